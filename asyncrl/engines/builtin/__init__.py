"""Built-in models, made and warmed up on first use, cached as ordinary Hugging Face folders."""
