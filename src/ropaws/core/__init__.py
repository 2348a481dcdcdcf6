"""What every room needs: label codes, records, seeds, files, terminal."""
