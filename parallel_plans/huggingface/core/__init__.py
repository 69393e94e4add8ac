"""What every part of the plan uses: masks, documents, and the attention function."""
