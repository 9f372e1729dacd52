package allreduce

import "unsafe"

// apply combines b into a, which are vectors of the operation's elements, aligned as those are and of one length.
func (op operation) apply(a, b []byte) {
	switch op {
	case sumFloat32:
		add(elements[float32](a), elements[float32](b))
	case sumInt64:
		add(elements[int64](a), elements[int64](b))
	case maxInt64:
		x, y := elements[int64](a), elements[int64](b)
		for i, v := range y {
			x[i] = max(x[i], v)
		}
	}
}

// add adds b to a, which has its length. The compiler does not unroll the loop; that it is, saves a tenth of the CPU time of a large
// all-reduce on loopback.
func add[T float32 | int64](a, b []T) {
	for len(a) >= 8 && len(b) >= 8 {
		x, y := (*[8]T)(a), (*[8]T)(b)
		x[0] += y[0]
		x[1] += y[1]
		x[2] += y[2]
		x[3] += y[3]
		x[4] += y[4]
		x[5] += y[5]
		x[6] += y[6]
		x[7] += y[7]
		a, b = a[8:], b[8:]
	}
	for i, v := range b {
		a[i] += v
	}
}

// bytesOf is v's memory: vectors travel as they lie there, in the byte order that the handshake compares.
func bytesOf[T float32 | int64](v []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*int(unsafe.Sizeof(*new(T))))
}

// elements is bytesOf backwards: b must be aligned for T.
func elements[T float32 | int64](b []byte) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(*new(T))))
}

// aligned is a buffer that elements can look into.
func aligned(n int) []byte { return bytesOf(make([]int64, (n+7)/8))[:n] }
