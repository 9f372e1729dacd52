package reference

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/capstan-gpu/capstan/trainer/agent"
	"github.com/capstan-gpu/capstan/trainer/ring"
)

// The gradient is that of the loss: moved by a little, the loss changes as it says.
func TestGradient(t *testing.T) {
	var m model
	for i := range m {
		m[i] = uniform(99, uint64(i))
	}
	const n, h = 12345, 1e-5
	var x [width]float64
	var p [Classes]float64
	class := sample(n, &x)
	loss := func() float64 {
		m.scores(&x, &p)
		return -math.Log(p[class])
	}
	sum := make([]int64, weights)
	m.gradient(n, sum)
	for i := 0; i < weights; i += 7 {
		old := m[i]
		m[i] = old + h
		up := loss()
		m[i] = old - h
		down := loss()
		m[i] = old
		if want, got := (up-down)/(2*h), float64(sum[i])/one; math.Abs(want-got) > 1e-6 {
			t.Fatalf("weight %d: gradient %g, finite difference %g", i, got, want)
		}
	}
}

// However a batch is shared, the sums are the same, and the ledger has each sample once.
func TestShares(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		batch := piece * rapid.IntRange(1, 12).Draw(t, "pieces")
		world := rapid.IntRange(1, 9).Draw(t, "world")
		step := rapid.Int64Range(0, 1e6).Draw(t, "step")
		total := make([]int64, weights+3)
		var alone []int64
		for w := range 1 + world {
			members, rank := world, w-1
			if w == 0 {
				members, rank = 1, 0
			}
			one := &Trainer{cfg: Config{Batch: batch}, state: &state{Step: step}, members: make([]agent.Peer, members), rank: rank, sum: make([]int64, weights+3)}
			one.compute()
			if w == 0 {
				alone = one.sum
				continue
			}
			for i, v := range one.sum {
				total[i] += v
			}
		}
		for i := range total {
			if total[i] != alone[i] {
				t.Fatalf("batch %d of %d workers: sum %d is %d, alone it is %d", batch, world, i, total[i], alone[i])
			}
		}
	})
}

func TestLedger(t *testing.T) {
	var l Ledger
	for n := range uint64(1000) {
		l.add(ledgerOf(n))
	}
	if !l.Each(1000) || l.Each(999) {
		t.Errorf("%+v: want each of 1000 once", l)
	}
	twice := l
	twice.add(ledgerOf(5))
	swapped := l // sample 7 in place of 8, twice
	swapped.add(Ledger{0, -8 + 7, -64 + 49})
	for _, wrong := range []Ledger{twice, swapped} {
		if wrong.Each(wrong.Count) {
			t.Errorf("%+v passes", wrong)
		}
	}
}

func TestState(t *testing.T) {
	dir := t.TempDir()
	s, err := load(dir)
	if err != nil || s.Step != 0 {
		t.Fatalf("without a checkpoint: %+v, %v", s, err)
	}
	s.Step, s.Ledger, s.Model[17] = 7, Ledger{1, 2, 3}, 0.5
	if err := s.save(dir); err != nil {
		t.Fatal(err)
	}
	back, err := load(dir)
	if err != nil || back.hash() != s.hash() {
		t.Errorf("read back: %v, hash %x, want %x", err, back.hash(), s.hash())
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("%d files in the folder, %v; want the checkpoint alone", len(files), err)
	}
	data := s.encode()
	for i := 0; i < len(data); i += 97 {
		spoiled := bytes.Clone(data)
		spoiled[i] ^= 1
		if _, err := decodeState(spoiled); err == nil {
			t.Fatalf("a state with byte %d changed is taken", i)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, checkpoint), data[:100], 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := load(dir); err == nil {
		t.Error("half a checkpoint is taken")
	}
}

// job is workers in this process, that find each other over loopback.
type job struct {
	*testing.T
	cfg     Config
	first   net.Listener
	workers map[int]*worker
}

type worker struct {
	agent   *agent.Agent
	trainer *Trainer
	stop    context.CancelFunc
	done    chan struct{}
	err     error
}

func listen(t *testing.T) *net.TCPListener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

func (j *job) start(ordinal int) {
	j.Helper()
	var l net.Listener = listen(j.T)
	if ordinal == 0 {
		l = j.first
	}
	data := listen(j.T)
	cfg := j.cfg
	cfg.Listener = data
	trainer, err := New(cfg)
	if err != nil {
		j.Fatal(err)
	}
	identity, err := agent.NewIdentity()
	if err != nil {
		j.Fatal(err)
	}
	secret, err := agent.NewSecret([]byte("a secret of the workers, long enough"))
	if err != nil {
		j.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	id := ring.ID{Ordinal: ordinal, Pod: fmt.Sprintf("uid-%d", ordinal), Boot: time.Now().UnixNano()}
	self, book := agent.Peer{ID: id, Address: l.Addr().String(), Data: data.Addr().String(), Key: identity.Key()}, &agent.Book{}
	a, err := agent.New(agent.Config{
		Ring: ring.Config{Job: cfg.Job, FixedCoordinator: true, ChangeInterval: 100 * time.Millisecond, Settle: 200 * time.Millisecond},
		Self: self, Trainer: trainer, Book: book, Logger: log, Linger: 200 * time.Millisecond,
		Cluster:   agent.NewFixed(id, 0, j.first.Addr().String(), log),
		Transport: agent.NewTCP(agent.TCPConfig{Job: cfg.Job, Self: self, Identity: identity, Auth: secret, Book: book, Listener: l, Logger: log}),
	})
	if err != nil {
		j.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	w := &worker{agent: a, trainer: trainer, stop: stop, done: make(chan struct{})}
	j.workers[ordinal] = w
	j.Cleanup(func() { stop(); <-w.done })
	go func() {
		defer close(w.done)
		_, w.err = a.Run(ctx)
	}()
}

// until waits for a world of a size that has done so many steps.
func (j *job) until(world int, step int64) {
	j.Helper()
	var s agent.Status
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if s = j.workers[0].agent.Status(); s.Phase == ring.Running && s.World == world && s.Step >= step || s.End != "" {
			return
		}
	}
	j.Fatalf("waited in vain for a world of %d at step %d: %+v", world, step, s)
}

// result waits for the job's end.
func (j *job) result() Result {
	j.Helper()
	w := j.workers[0]
	select {
	case <-w.done:
	case <-time.After(2 * time.Minute):
		j.Fatalf("the job does not end: %+v", w.agent.Status())
	}
	if s := w.agent.Status(); w.err != nil || s.End != string(ring.Succeeded) {
		j.Fatalf("the job ended with %v: %+v", w.err, s)
	}
	r, ok := w.trainer.Result()
	if !ok {
		j.Fatal("no result after the end")
	}
	return r
}

// A job that goes 2→4→3 with a worker killed in between ends with the same bits as one that a single worker did, and every sample counts
// once.
func TestResultDoesNotDependOnSize(t *testing.T) {
	run := func(name string, takes time.Duration, history func(j *job)) Result {
		j := &job{T: t, workers: map[int]*worker{}, first: listen(t), cfg: Config{Job: name, Batch: 256, Steps: 400, Rate: 2, StepTakes: takes, Timeout: 2 * time.Second}}
		history(j)
		r := j.result()
		for ordinal, w := range j.workers {
			<-w.done
			if s := w.agent.Status(); s.End == string(ring.Succeeded) {
				if other, ok := w.trainer.Result(); !ok || other != r {
					t.Errorf("%s: worker %d ends with %+v, worker 0 with %+v", name, ordinal, other, r)
				}
			}
		}
		if !r.Once || r.Samples != 400*256 {
			t.Errorf("%s: %+v; want each of %d samples counted once", name, r, 400*256)
		}
		t.Logf("%s: %+v", name, r)
		return r
	}
	alone := run("alone", 0, func(j *job) { j.start(0) })
	if plain := Alone(256, 400, 2); plain != alone {
		t.Errorf("without a ring %+v, in a ring of one %+v; want the same bits", plain, alone)
	}
	if alone.Accuracy < 0.9 {
		t.Errorf("accuracy %.3f, want 0.9", alone.Accuracy)
	}
	resized := run("2 to 4 to 3, and one lost", 30*time.Millisecond, func(j *job) {
		j.start(0)
		j.start(1)
		j.until(2, 20)
		j.start(2)
		j.start(3)
		j.until(4, 60)
		j.workers[3].agent.Drain()
		j.until(3, 120)
		j.workers[1].stop() // as a process that is killed: no word to anybody
		j.until(2, 180)
	})
	if resized != alone {
		t.Errorf("resized %+v, alone %+v; want the same bits", resized, alone)
	}
}
