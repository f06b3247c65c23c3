"""What backends over latents (MLA) share: the projection, the plan of a batch, prefills in pieces."""
