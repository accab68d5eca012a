"""The programs that come with hvdlite; they use it as users' programs do."""
