"""Memory of an extension module that numpy reads in place; included by each of them."""


cdef class Column:
    """Bytes in C memory, as a buffer. They live as long as any array made of them."""

    cdef void* memory
    cdef Py_ssize_t length

    def __dealloc__(self):
        free(self.memory)

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.memory, self.length, 0, flags)

    def __releasebuffer__(self, Py_buffer* view):
        pass

    def __len__(self):
        return self.length


cdef Column adopt(void** memory, size_t length):
    """A column of `length` bytes, which takes the memory over and gives back what is too much."""
    cdef Column column = Column()
    cdef void* smaller = realloc(memory[0], length if length else 1)
    column.memory = memory[0] if smaller == NULL else smaller
    column.length = <Py_ssize_t>length
    memory[0] = NULL
    return column
