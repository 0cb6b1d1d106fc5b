// The runtime's wheels leave out the compiler's headers, and the API headers want this one from there. For a host
// compiler most of its words mean nothing. Found after all other directories, so a toolkit's own comes first.
#pragma once

// Where code and data live: one place, here.
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __grid_constant__

// Marks for the vendor's compiler.
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __specialization_static static
#define __import__
#define __export__
#define __location__(where)

// What a host compiler has too. Not __noinline__: the C++ library uses the word as an attribute.
#define __annotate__(what) __attribute__((what))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __cdecl
#define CUDARTAPI
#define CUDARTAPI_CDECL
