"""The heart: a prioritized replay buffer whose priorities decay with the age of the policy that wrote them."""
