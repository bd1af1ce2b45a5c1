"""Publishing an audit: its folder, the plan for a repository, and the pull request."""
