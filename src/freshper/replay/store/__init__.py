"""What is kept: the token arena, items in their slots, who comes in and who has to leave."""
