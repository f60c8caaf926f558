"""``freshper envs``."""

import json

from freshper import cli, envs


def test_envs_lists_the_tasks_one_a_line(capsys):
    assert cli.main(["envs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == envs.task_names()
    assert [line.split(maxsplit=1)[1] for line in lines] == [envs.describe(task) for task in envs.task_names()]


def test_envs_as_json(capsys):
    assert cli.main(["envs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {task: envs.describe(task) for task in envs.task_names()}
