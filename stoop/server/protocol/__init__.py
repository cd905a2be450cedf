"""The requests of each endpoint, checked by pydantic."""
