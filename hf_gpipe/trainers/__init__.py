"""Trainers with the interfaces of TRL and sentence-transformers: fine-tuning, preferences, rewards, embeddings."""
