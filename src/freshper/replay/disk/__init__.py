"""What survives: snapshots, the durable directory with its journal, and files for other tools."""
