"""Who proposes tokens: a smaller model, the text so far, or nobody."""
