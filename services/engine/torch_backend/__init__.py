"""Real models with torch, run layer by layer on KV that this project keeps."""
