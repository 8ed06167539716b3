"""What fetching keeps on this disk: towers, small files, and the commits of branches."""
