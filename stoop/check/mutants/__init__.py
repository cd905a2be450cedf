"""Past bugs that can be put back one at a time, to see what catches each."""
