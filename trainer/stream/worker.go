package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/capstan-gpu/capstan/trainer/stats"
)

// WorkerConfig is what a [Worker] needs.
type WorkerConfig struct {
	Name     string        // the same after a restart; a pod's name
	Source   *Client       //
	Capacity float64       // samples/s that it can do, 1 to MaxRate
	Step     time.Duration // how long a full step takes, 1 ms to 1 s; its samples = Capacity × Step, at least 1
	Busy     []string      // files that get its busy share, see [BusyFiles]
	Logger   *slog.Logger
}

// Worker does samples: it is busy for as long as computing them would take. Safe for concurrent use.
type Worker struct {
	cfg   WorkerConfig
	batch int64 // samples of a full step

	reached          atomic.Bool // the source answered once
	steps, samples   atomic.Int64
	step             atomic.Int64 // nanoseconds that the newest full or part step took; 0 = none yet
	compute, starved meter
}

// handBack is how long a worker that was told to stop may take to say what it did not do.
const handBack = 1500 * time.Millisecond

// NewWorker checks the configuration. [Worker.Run] starts it.
func NewWorker(cfg WorkerConfig) (*Worker, error) {
	if cfg.Name == "" || len(cfg.Name) > MaxName {
		return nil, fmt.Errorf("worker name of %d bytes: want 1 to %d", len(cfg.Name), MaxName)
	}
	if !(cfg.Capacity >= 1 && cfg.Capacity <= MaxRate) {
		return nil, fmt.Errorf("capacity %v: want 1 to %g samples/s", cfg.Capacity, float64(MaxRate))
	}
	if cfg.Step < time.Millisecond || cfg.Step > time.Second {
		return nil, fmt.Errorf("step %s: want 1ms to 1s", cfg.Step)
	}
	return &Worker{cfg: cfg, batch: min(MaxBatch, max(1, int64(math.Round(cfg.Capacity*cfg.Step.Seconds()))))}, nil
}

// settlement is a lease that ends, and how many of its samples were done.
type settlement struct {
	work Work
	n    int64
}

// Run pulls and does samples until ctx is done; then it hands back what it did not do, within two seconds, and returns nil.
// A source that does not answer is waited for, for ever.
func (w *Worker) Run(ctx context.Context) error {
	// The next samples are asked for while the present ones are computed, and settled behind them: a busy worker never waits for
	// the network, so that its busy share is 1 when there is enough to do.
	works := make(chan Work)
	settlements := make(chan settlement, 4)
	var pulling, settling sync.WaitGroup
	pulling.Go(func() {
		defer close(works)
		w.pull(ctx, works, settlements)
	})
	settling.Go(func() { w.settle(ctx, settlements) })
	settling.Go(func() { writeBusy(ctx, w.cfg.Busy, &w.compute, w.cfg.Logger) })
	w.work(ctx, works, settlements)
	pulling.Wait()
	close(settlements)
	settling.Wait()
	return nil
}

// pull keeps one lease ready.
func (w *Worker) pull(ctx context.Context, works chan<- Work, settlements chan<- settlement) {
	wait, silent := time.Duration(0), false
	for ctx.Err() == nil {
		work, ok, err := w.cfg.Source.Pull(ctx, w.cfg.Name, w.batch)
		if err != nil {
			if !silent && ctx.Err() == nil {
				w.cfg.Logger.Warn("the source does not answer; waiting for it", "error", err)
			}
			silent = true
			wait = min(2*time.Second, max(100*time.Millisecond, 2*wait))
			sleep(ctx, wait)
			continue
		}
		if silent || !w.reached.Load() {
			w.cfg.Logger.Info("the source answers")
		}
		w.reached.Store(true)
		wait, silent = 0, false
		if !ok {
			continue
		}
		select {
		case works <- work:
		case <-ctx.Done():
			settlements <- settlement{work, 0}
		}
	}
}

// work computes, one lease after the other.
func (w *Worker) work(ctx context.Context, works <-chan Work, settlements chan<- settlement) {
	var free time.Time // when the step before was to end
	for {
		asked := time.Now()
		w.starved.begin(asked)
		work, ok := <-works
		begun := time.Now()
		w.starved.end(begun)
		if !ok {
			return
		}
		// Timers fire late. A step that follows at once begins when the one before was to end, so that the capacity is what it is said to be.
		start := begun
		if begun.Sub(asked) < time.Millisecond && begun.Sub(free) < w.cfg.Step {
			start = free
		}
		free = start.Add(time.Duration(float64(work.Count) / w.cfg.Capacity * float64(time.Second)))
		w.compute.begin(begun)
		finished := sleep(ctx, time.Until(free))
		end := time.Now()
		w.compute.end(end)
		n := work.Count
		if !finished {
			n = max(0, min(n, int64(end.Sub(start).Seconds()*w.cfg.Capacity)))
		}
		if n > 0 {
			w.steps.Add(1)
			w.step.Store(int64(end.Sub(start)))
		}
		settlements <- settlement{work, n}
	}
}

// settle tells the source, until the channel is closed. What it does not hear of in time, it gives to another worker.
func (w *Worker) settle(ctx context.Context, settlements <-chan settlement) {
	inTime, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(handBack, cancel) })
	defer stop()
	for s := range settlements {
		w.settleOne(inTime, s)
	}
}

func (w *Worker) settleOne(ctx context.Context, s settlement) {
	for wait := 50 * time.Millisecond; ; wait *= 2 {
		err := w.cfg.Source.Done(ctx, w.cfg.Name, s.work.Lease, s.n)
		switch {
		case err == nil:
			w.samples.Add(s.n)
			return
		case errors.Is(err, ErrLate), wait > 2*time.Second, !sleep(ctx, wait):
			w.cfg.Logger.Warn("the source did not take a lease back; another worker does its samples", "lease", s.work.Lease, "done", s.n, "of", s.work.Count, "error", err)
			return
		}
	}
}

// sleep waits; false when ctx was done before.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// Stats is what the stats page says. This trainer has no ring, so the page has no rank, size or generation.
func (w *Worker) Stats() []stats.Sample {
	now := time.Now()
	page := []stats.Sample{
		{Name: stats.Steps, Value: float64(w.steps.Load())},
		{Name: stats.Samples, Value: float64(w.samples.Load())},
		{Name: stats.ComputeSeconds, Value: w.compute.total(now).Seconds()},
		{Name: stats.DataWaitSeconds, Value: w.starved.total(now).Seconds()},
	}
	if step := w.step.Load(); step > 0 {
		page = append(page, stats.Sample{Name: stats.StepDuration, Value: time.Duration(step).Seconds()})
	}
	return page
}

// Handler serves the stats page, and /healthz: 200 once the source has answered.
func (w *Worker) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET "+stats.Path, stats.Handler(w.Stats))
	mux.HandleFunc("GET /healthz", func(rw http.ResponseWriter, _ *http.Request) {
		if !w.reached.Load() {
			http.Error(rw, "the source has not answered yet", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(rw, "ok")
	})
	return mux
}
