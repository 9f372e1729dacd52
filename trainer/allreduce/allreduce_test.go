package allreduce

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Every group of every test must have ended with all its goroutines.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var key = []byte("0123456789abcdef0123456789abcdef")

// listen is a loopback listener that ends with the test.
func listen(t testing.TB) *net.TCPListener {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// configs are those of a world on loopback, which agree.
func configs(t testing.TB, world int) (all []Config) {
	t.Helper()
	var addresses []string
	for rank := range world {
		l := listen(t)
		addresses = append(addresses, l.Addr().String())
		all = append(all, Config{Job: "job-1", Generation: 7, Key: key, Rank: rank, Listener: l})
	}
	for rank := range all {
		all[rank].Addresses = addresses
	}
	return all
}

// open opens all groups at once.
func open(t testing.TB, all []Config) []*Group {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	groups := make([]*Group, len(all))
	errs := make([]error, len(all))
	each(len(all), func(i int) { groups[i], errs[i] = Open(ctx, all[i]) })
	for _, g := range groups {
		if g != nil {
			t.Cleanup(func() { g.Close() })
		}
	}
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
	return groups
}

// world is an open group of so many ranks.
func world(t testing.TB, n int) []*Group {
	t.Helper()
	return open(t, configs(t, n))
}

// each calls f for 0 to n-1 at the same time, and waits for all.
func each(n int, f func(i int)) {
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { f(i) })
	}
	all.Wait()
}

// together has every rank do f, and wants no error.
func together(t testing.TB, groups []*Group, f func(g *Group) error) {
	t.Helper()
	errs := make([]error, len(groups))
	each(len(groups), func(i int) { errs[i] = f(groups[i]) })
	for rank, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", rank, err)
		}
	}
}

// naiveFloat32 adds in the order that the package comment promises, element by element.
func naiveFloat32(in [][]float32) (sum []float32) {
	world, n := len(in), len(in[0])
	sum = make([]float32, n)
	for j := range sum {
		if 4*n > smallBytes {
			first := 0
			for i := range world {
				if j >= n*i/world && j < n*(i+1)/world {
					first = i
				}
			}
			for k := range world {
				if x := in[(first+k)%world][j]; k == 0 {
					sum[j] = x
				} else {
					sum[j] += x
				}
			}
			continue
		}
		power := 1
		for 2*power <= world {
			power *= 2
		}
		var level []float32
		for r := range power {
			x := in[r][j]
			if r+power < world {
				x += in[r+power][j]
			}
			level = append(level, x)
		}
		for len(level) > 1 {
			var above []float32
			for i := 0; i < len(level); i += 2 {
				above = append(above, level[i]+level[i+1])
			}
			level = above
		}
		sum[j] = level[0]
	}
	return sum
}

// lengths are those that meet every boundary: none, fewer than ranks, the end of recursive doubling, segments of no, one and several
// chunks, and what no world divides.
func lengths(world int, size int, random *rand.Rand) []int {
	small, chunk := smallBytes/size, chunkBytes/size
	return []int{0, 1, world - 1, world, world + 1, random.IntN(small), small, small + 1, small + 1 + random.IntN(chunk),
		world*chunk + random.IntN(3) - 1, world*chunk + random.IntN(chunk)}
}

// Every collective gives what one process would compute of the same inputs, bit by bit, in every world and with every kind of length.
func TestNaiveTwin(t *testing.T) {
	for n := 1; n <= 8; n++ {
		t.Run(fmt.Sprint("world ", n), func(t *testing.T) {
			seed := uint64(time.Now().UnixNano())
			random := rand.New(rand.NewPCG(seed, 0))
			defer func() {
				if t.Failed() {
					t.Logf("seed %d", seed)
				}
			}()
			groups := world(t, n)
			for _, length := range lengths(n, 4, random) {
				in := make([][]float32, n)
				for r := range in {
					in[r] = make([]float32, length)
					for i := range in[r] {
						// Any sign and fraction, and exponents from -16 to 15, so that another order gives other bits.
						bits := random.Uint64()
						in[r][i] = math.Float32frombits(uint32(bits)&^(255<<23) | uint32(111+bits>>32%32)<<23)
					}
				}
				want := naiveFloat32(in)
				together(t, groups, func(g *Group) error { return g.SumFloat32(in[g.Rank()]) })
				for r := range in {
					for i := range want {
						if math.Float32bits(in[r][i]) != math.Float32bits(want[i]) {
							t.Fatalf("float32 sum of %d: rank %d element %d is %v, want %v", length, r, i, in[r][i], want[i])
						}
					}
				}
			}
			for _, length := range lengths(n, 8, random) {
				in, high := make([][]int64, n), make([][]int64, n)
				sum, maximum := make([]int64, length), make([]int64, length)
				for i := range maximum {
					maximum[i] = math.MinInt64
				}
				for r := range in {
					in[r] = make([]int64, length)
					for i := range in[r] {
						in[r][i] = int64(random.Uint64()) // wraps
						sum[i] += in[r][i]
						maximum[i] = max(maximum[i], in[r][i])
					}
					high[r] = slices.Clone(in[r])
				}
				together(t, groups, func(g *Group) error {
					if err := g.SumInt64(in[g.Rank()]); err != nil {
						return err
					}
					return g.MaxInt64(high[g.Rank()])
				})
				for r := range in {
					if !slices.Equal(in[r], sum) {
						t.Fatalf("int64 sum of %d differs at rank %d", length, r)
					}
					if !slices.Equal(high[r], maximum) {
						t.Fatalf("int64 maximum of %d differs at rank %d", length, r)
					}
				}
			}
		})
	}
}

// An int64 sum of the same parts is the same, whoever brings which part and however many they are.
func TestInt64SumDependsOnNoWorld(t *testing.T) {
	const parts, length = 24, 3 * chunkBytes / 8
	part := func(p int) []int64 {
		random := rand.New(rand.NewPCG(1, uint64(p)))
		v := make([]int64, length)
		for i := range v {
			v[i] = int64(random.Uint64())
		}
		return v
	}
	var want []int64
	for _, n := range []int{1, 2, 3, 4} {
		sums := make([][]int64, n)
		together(t, world(t, n), func(g *Group) error {
			v := make([]int64, length)
			for p := g.Rank(); p < parts; p += n {
				for i, x := range part(p) {
					v[i] += x
				}
			}
			sums[g.Rank()] = v
			return g.SumInt64(v)
		})
		if want == nil {
			want = sums[0]
		}
		for r, v := range sums {
			if !slices.Equal(v, want) {
				t.Errorf("world %d, rank %d: another sum than in a world of 1", n, r)
			}
		}
	}
}

// Nobody leaves a barrier before the last has come.
func TestBarrier(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5, 8} {
		groups := world(t, n)
		var mu sync.Mutex
		come := 0
		for round := 1; round <= 20; round++ {
			together(t, groups, func(g *Group) error {
				if (g.Rank()+round)%n == 0 {
					time.Sleep(time.Millisecond) // the last one, another in every round
				}
				mu.Lock()
				come++
				mu.Unlock()
				err := g.Barrier()
				mu.Lock()
				defer mu.Unlock()
				if come < n*round {
					t.Errorf("world %d: rank %d passes barrier %d when %d have come to it", n, g.Rank(), round, come-n*(round-1))
				}
				return err
			})
		}
	}
}

// No collective of numbers allocates once the group is warm, small or large.
func TestNoAllocations(t *testing.T) {
	for _, length := range []int{1, 512, chunkBytes} {
		groups := world(t, 3)
		const runs = 20
		call := func(g *Group, v []float32, w []int64) {
			if g.SumFloat32(v) != nil || g.MaxInt64(w) != nil || g.Barrier() != nil {
				t.Error(g.Err())
			}
		}
		var others sync.WaitGroup
		for _, g := range groups[1:] {
			v, w := make([]float32, length), make([]int64, length)
			others.Go(func() {
				for range runs + 1 { // AllocsPerRun warms up with one more
					call(g, v, w)
				}
			})
		}
		v, w := make([]float32, length), make([]int64, length)
		// It counts all goroutines of the process: those of the other ranks, too.
		if n := testing.AllocsPerRun(runs, func() { call(groups[0], v, w) }); n >= 1 {
			t.Errorf("%d elements: %v allocations in a round of all ranks, want 0", length, n)
		}
		others.Wait()
	}
}

func TestBandwidth(t *testing.T) {
	for _, c := range []struct {
		bytes          int64
		world          int
		took           time.Duration
		algorithm, bus float64
	}{
		{1e9, 2, time.Second, 1e9, 1e9},
		{1e9, 4, 500 * time.Millisecond, 2e9, 3e9},
		{1e9, 8, time.Second, 1e9, 1.75e9},
		{1e9, 1, time.Second, 1e9, 0}, // nothing moves
		{1e9, 2, 0, 0, 0},
		{1e9, 0, time.Second, 0, 0},
		{0, 4, time.Second, 0, 0},
	} {
		if a, b := Bandwidth(c.bytes, c.world, c.took); a != c.algorithm || b != c.bus {
			t.Errorf("Bandwidth(%d, %d, %s) = %g, %g, want %g, %g", c.bytes, c.world, c.took, a, b, c.algorithm, c.bus)
		}
	}
}

// A link has two ends: few for each rank, with all on the ring, and in a world of two one for each direction.
func TestLinks(t *testing.T) {
	for n := 1; n <= 70; n++ {
		for r := range n {
			all := links(r, n)
			if len(all) > 3+7 {
				t.Errorf("world %d: rank %d has %d links", n, r, len(all))
			}
			for _, l := range all {
				if l.peer < 0 || l.peer >= n || l.peer == r || !slices.Contains(links(l.peer, n), link{r, l.lane}) {
					t.Errorf("world %d: rank %d has link %v, which has no other end", n, r, l)
				}
			}
			if n == 1 {
				continue
			}
			next, prev := besides(r, n)
			if !slices.Contains(all, next) || !slices.Contains(all, prev) || next == prev {
				t.Errorf("world %d: rank %d has %v, and needs %v and %v", n, r, all, next, prev)
			}
			if _, back := besides(next.peer, n); back != (link{r, next.lane}) {
				t.Errorf("world %d: rank %d sends on %v, and rank %d listens on %v", n, r, next, next.peer, back)
			}
		}
	}
}

func TestSegments(t *testing.T) {
	for n := 1; n <= 9; n++ {
		for _, elements := range []int{0, 1, 7, 8, 9, 1000} {
			v := vector{data: make([]byte, 8*elements), size: 8}
			end := 0
			for i := range n {
				low, high := v.segment(i, n)
				if low != end || high < low || low%8 != 0 {
					t.Errorf("%d elements, world %d: segment %d is [%d, %d), the one before ends at %d", elements, n, i, low, high, end)
				}
				if l, h := v.segment(i-n, n); l != low || h != high {
					t.Errorf("segment %d is not segment %d", i-n, i)
				}
				end = high
			}
			if end != len(v.data) {
				t.Errorf("%d elements, world %d: the segments end at %d", elements, n, end)
			}
		}
	}
}

func TestFrame(t *testing.T) {
	f := frame{kind: kindAbort, op: maxInt64, rank: MaxWorld - 1, length: math.MaxUint32, sequence: math.MaxUint64 - 1}
	b := make([]byte, headerBytes)
	f.put(b)
	if got := parseFrame(b); got != f {
		t.Errorf("a frame comes back as %+v, want %+v", got, f)
	}
	if got := binary.LittleEndian.Uint64(b[8:]); got != math.MaxUint64-1 {
		t.Errorf("the sequence is at the wrong place: %d", got)
	}
}
