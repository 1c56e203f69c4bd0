"""Load generator: replays agent sessions against an OpenAI-compatible endpoint and measures from the client's clock."""
