"""Real models with torch: transformers run layer by layer on KV that this project keeps."""
