"""Tables, figures and the page of results."""
