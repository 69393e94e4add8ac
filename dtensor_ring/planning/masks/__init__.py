"""What queries see: masks, documents and slices, and how users say them."""
