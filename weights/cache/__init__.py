"""Towers, small files and the commits of branches that fetching keeps on this disk."""
