"""`map`: many requests at a time. The only thing that is written twice, for threads and for tasks, over one
`Window`."""
