// Allreduce measures the collectives of trainer/allreduce on this machine's loopback, 4 B to 64 MiB in worlds of 2 and 4, each all-reduce
// right after a raw one-way copy of as many bytes over one loopback connection. It writes bench/allreduce.json.
//
// allreduce_16mib_fraction_of_loopback is what two ranks move in a second while they all-reduce 16 MiB of float32 (both ranks' bus
// bandwidth, 2(N−1)·S/t = 2·S/t), over what one raw connection moves; the median of the rounds, each of which is compared with the copy
// just before it. It is the sum of both ranks, for on one host they share what the raw copy has alone: that keeps two cores busy, one
// sending and one receiving, and here each rank does both. On cores that others use, too, it falls: four busy threads lose more than two.
package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/capstan-gpu/capstan/test/bench/report"
	"github.com/capstan-gpu/capstan/trainer/allreduce"
)

const (
	out     = "bench/allreduce.json"
	mebi    = 1 << 20
	largest = 64 * mebi
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	figures, err := measure(ctx)
	if err == nil {
		err = report.Write(out, figures)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench allreduce:", err)
		os.Exit(1)
	}
}

// row is one size, with medians.
type row struct {
	bytes     int
	raw, took time.Duration // a one-way copy, an all-reduce
	fraction  float64       // of raw bandwidth that all ranks' traffic has, round by round
}

func measure(ctx context.Context) (figures []report.Figure, err error) {
	for _, world := range []int{2, 4} {
		s, err := measureWorld(ctx, world)
		if err != nil {
			return nil, fmt.Errorf("world of %d: %w", world, err)
		}
		rows := s.rows
		print(world, rows)
		at := func(bytes int) row { return rows[slices.IndexFunc(rows, func(r row) bool { return r.bytes == bytes })] }
		big := at(16 * mebi)
		_, bus := allreduce.Bandwidth(16*mebi, world, big.took)
		raw := 16 * mebi / big.raw.Seconds()
		if world == 2 {
			figures = append(figures, report.AtLeast("allreduce_16mib_fraction_of_loopback", big.fraction, "", 0.7,
				fmt.Sprintf("bytes that 2 ranks move (%.2f GB/s each) / raw one-way copy (%.2f GB/s), %d cores; medians", bus/1e9, raw/1e9, runtime.NumCPU())))
		} else {
			figures = append(figures, report.AtMost("allreduce_open_4_ranks_ms", s.opened.Seconds()*1000, "ms", 100, "all connections and handshakes of a generation, local; median"),
				report.AtLeast("allreduce_broadcast_64mib_mb_per_second", largest/1e6/s.copied.Seconds(), "MB/s", 50, "to 3 ranks at once, hashed; median. The time-out of a state's copy counts on 50"))
		}
	}
	return figures, nil
}

func print(world int, rows []row) {
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "world of %d\tall-reduce\talgbw\tbusbw\tall ranks\traw copy\tall ranks/raw\t\n", world)
	for _, r := range rows {
		algorithm, bus := allreduce.Bandwidth(int64(r.bytes), world, r.took)
		raw := float64(r.bytes) / r.raw.Seconds()
		fmt.Fprintf(t, "%s\t%s\t%.3f GB/s\t%.3f GB/s\t%.3f GB/s\t%.3f GB/s\t%.2f\t\n", size(r.bytes), r.took.Round(time.Microsecond/10), algorithm/1e9, bus/1e9, bus*float64(world)/1e9, raw/1e9, r.fraction)
	}
	t.Flush()
}

func size(bytes int) string {
	switch {
	case bytes >= mebi:
		return fmt.Sprintf("%d MiB", bytes/mebi)
	case bytes >= 1<<10:
		return fmt.Sprintf("%d KiB", bytes>>10)
	default:
		return fmt.Sprintf("%d B", bytes)
	}
}

// series is what was measured in one world.
type series struct {
	rows   []row
	opened time.Duration // from nothing to all connections
	copied time.Duration // a broadcast of the largest size to all other ranks
}

func measureWorld(ctx context.Context, world int) (s series, err error) {
	var groups []*allreduce.Group
	closeAll := func() { each(len(groups), func(i int) error { return groups[i].Close() }) }
	var opens []time.Duration
	for range 21 {
		closeAll()
		began := time.Now()
		if groups, err = open(ctx, world); err != nil {
			return s, err
		}
		opens = append(opens, time.Since(began))
	}
	s.opened = median(opens)
	defer closeAll()
	defer context.AfterFunc(ctx, func() {
		for _, g := range groups {
			g.Abort(context.Cause(ctx))
		}
	})()
	copier, err := newRaw()
	if err != nil {
		return s, err
	}
	defer copier.close()

	vectors := make([][]float32, world)
	for i := range vectors {
		vectors[i] = make([]float32, largest/4)
	}
	for size := 4; size <= largest; size *= 4 {
		var raws, reduces []time.Duration
		var fractions []float64
		rounds := min(2000, max(31, 2048*mebi/size/world))
		for i := range rounds + rounds/10 + 1 {
			raw, err := copier.copy(size)
			if err != nil {
				return s, err
			}
			began := time.Now()
			if err := each(world, func(rank int) error { return groups[rank].SumFloat32(vectors[rank][:size/4]) }); err != nil {
				return s, err
			}
			if i > rounds/10 { // warm
				took := time.Since(began)
				raws, reduces = append(raws, raw), append(reduces, took)
				_, bus := allreduce.Bandwidth(int64(size), world, took)
				fractions = append(fractions, bus*float64(world)/(float64(size)/raw.Seconds()))
			}
		}
		s.rows = append(s.rows, row{size, median(raws), median(reduces), median(fractions)})
	}
	var copies []time.Duration
	state := make([]byte, largest)
	for range 7 {
		began := time.Now()
		if err := each(world, func(rank int) error {
			_, err := groups[rank].Broadcast(0, bytes.NewReader(state), io.Discard, nil)
			return err
		}); err != nil {
			return s, err
		}
		copies = append(copies, time.Since(began))
	}
	s.copied = median(copies)
	return s, nil
}

func median[T cmp.Ordered](values []T) T {
	slices.Sort(values)
	return values[len(values)/2]
}

// open makes a world on loopback.
func open(ctx context.Context, world int) ([]*allreduce.Group, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	key := make([]byte, 32)
	rand.Read(key)
	addresses := make([]string, world)
	listeners := make([]*net.TCPListener, world)
	for i := range listeners {
		l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			return nil, err
		}
		defer l.Close()
		listeners[i], addresses[i] = l, l.Addr().String()
	}
	groups := make([]*allreduce.Group, world)
	err := each(world, func(rank int) (err error) {
		groups[rank], err = allreduce.Open(ctx, allreduce.Config{Job: "bench", Generation: 1, Key: key, Rank: rank, Addresses: addresses, Listener: listeners[rank]})
		return err
	})
	return groups, err
}

// each calls f for 0 to n-1 at the same time.
func each(n int, f func(i int) error) error {
	errs := make(chan error, n)
	for i := range n {
		go func() { errs <- f(i) }()
	}
	var first error
	for range n {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	return first
}

// raw is one loopback connection.
type raw struct {
	from, to net.Conn
	data     []byte
	wanted   chan int
	done     chan error
}

func newRaw() (*raw, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	r := &raw{data: make([]byte, largest), wanted: make(chan int), done: make(chan error)}
	if r.from, err = net.Dial("tcp", l.Addr().String()); err != nil {
		return nil, err
	}
	if r.to, err = l.Accept(); err != nil {
		r.from.Close()
		return nil, err
	}
	go func() {
		into := make([]byte, largest)
		for n := range r.wanted {
			_, err := io.ReadFull(r.to, into[:n])
			r.done <- err
		}
	}()
	return r, nil
}

// copy moves so many bytes one way, and returns when they are there.
func (r *raw) copy(bytes int) (time.Duration, error) {
	r.wanted <- bytes
	began := time.Now()
	if _, err := r.from.Write(r.data[:bytes]); err != nil {
		return 0, err
	}
	err := <-r.done
	return time.Since(began), err
}

func (r *raw) close() {
	close(r.wanted)
	r.from.Close()
	r.to.Close()
}
