package stream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/capstan-gpu/capstan/trainer/stats"
	"github.com/google/go-cmp/cmp"
)

// wire carries requests to a handler without a socket, so that time can be synctest's.
type wire struct {
	to  atomic.Pointer[Source]
	cut atomic.Bool // nothing gets through
}

func wireTo(s *Source) *wire {
	w := &wire{}
	w.to.Store(s)
	return w
}

func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	if w.cut.Load() {
		return nil, errors.New("no route to host")
	}
	recorder := httptest.NewRecorder()
	done := make(chan struct{})
	inner := r.Clone(r.Context())
	if inner.Body == nil {
		inner.Body = http.NoBody
	}
	handler := w.to.Load().Handler()
	go func() {
		defer close(done)
		handler.ServeHTTP(recorder, inner)
	}()
	select {
	case <-done:
		return recorder.Result(), nil
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}

// job is a source and its workers, all in one bubble of time.
type job struct {
	*testing.T
	ctx    context.Context
	source *Source
}

func start(t *testing.T, rate float64) *job {
	j := &job{T: t}
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() { cancel(); synctest.Wait() })
	j.ctx = ctx
	source, err := NewSource(Config{Rate: rate}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	j.source = source
	go source.Run(ctx)
	return j
}

// worker starts one of 100 samples/s. stop ends it as SIGTERM would, and returns how long it took.
func (j *job) worker(name string, busy ...string) (w *Worker, line *wire, stop func() time.Duration) {
	line = wireTo(j.source)
	client, err := NewClient("http://source", line)
	if err != nil {
		j.Fatal(err)
	}
	w, err = NewWorker(WorkerConfig{Name: name, Source: client, Capacity: 100, Step: 100 * time.Millisecond, Busy: busy, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		j.Fatal(err)
	}
	ctx, cancel := context.WithCancel(j.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := w.Run(ctx); err != nil {
			j.Errorf("worker %s: %v", name, err)
		}
	}()
	return w, line, func() time.Duration {
		asked := time.Now()
		cancel()
		<-done
		return time.Since(asked)
	}
}

func (j *job) rate(rate float64) {
	j.source.mu.Lock()
	defer j.source.mu.Unlock()
	if err := j.source.stream.SetRate(rate, time.Now()); err != nil {
		j.Fatal(err)
	}
}

// busy is how busy the workers are for the next ten seconds, in whole percent.
func busy(workers ...*Worker) (percent []int) {
	var before []time.Duration
	for _, w := range workers {
		before = append(before, w.compute.total(time.Now()))
	}
	time.Sleep(10 * time.Second)
	for i, w := range workers {
		percent = append(percent, int((w.compute.total(time.Now())-before[i]).Seconds()*10+0.5))
	}
	return percent
}

func TestBusyAsMuchAsLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := start(t, 100)
		a, _, _ := j.worker("worker-0")
		b, _, _ := j.worker("worker-1")
		near := func(what string, want int, got []int) {
			t.Helper()
			for i, p := range got {
				if p < want-2 || p > want+2 {
					t.Errorf("%s: worker %d is %d %% busy, want %d", what, i, p, want)
				}
			}
		}
		time.Sleep(time.Second)
		near("100/s by two of 100/s", 50, busy(a, b))
		j.rate(300)
		time.Sleep(time.Second)
		near("300/s by two of 100/s", 100, busy(a, b))
		j.rate(120)
		c, _, _ := j.worker("worker-2")
		d, _, _ := j.worker("worker-3")
		time.Sleep(20 * time.Second) // the backlog is done
		near("120/s by four of 100/s", 30, busy(a, b, c, d))
		if got := j.source.Status(); got.Lost != 0 || got.Duplicates != 0 || got.Returned != 0 || got.Backlog > 20 {
			t.Errorf("account %+v, want nothing lost, twice, returned or left", got)
		}
	})
}

// A worker that is told to stop says how far it got within two seconds; nobody waits for its lease to run out.
func TestStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := start(t, 300)
		w, _, stop := j.worker("worker-0")
		time.Sleep(3*time.Second + 50*time.Millisecond)
		if took := stop(); took > 2*time.Second {
			t.Errorf("stopping took %s", took)
		}
		got := j.source.Status()
		if got.Leased != 0 || got.Returned == 0 || got.Completed < 290 || got.Lost != 0 {
			t.Errorf("account %+v, want no sample with the worker", got)
		}
		if n := w.samples.Load(); n != got.Completed {
			t.Errorf("the worker counts %d samples, the source %d", n, got.Completed)
		}
	})
}

// A worker that cannot be reached any more keeps its samples for five seconds, and what it did meanwhile counts once.
func TestCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := start(t, 50)
		_, line, _ := j.worker("worker-0")
		other, _, _ := j.worker("worker-1")
		time.Sleep(5 * time.Second)
		line.cut.Store(true)
		time.Sleep(20 * time.Second)
		got := j.source.Status()
		if got.Lost != 0 || got.Duplicates != 0 || got.Backlog+got.Leased > 30 || got.Returned == 0 {
			t.Errorf("account while one is cut off: %+v", got)
		}
		line.cut.Store(false)
		time.Sleep(10 * time.Second)
		var sum int64
		for _, w := range j.source.Status().Workers {
			sum += w.Completed
		}
		if got := j.source.Status(); got.Completed != sum || got.Lost != 0 || got.Duplicates != 0 {
			t.Errorf("account afterwards: %+v, workers completed %d", got, sum)
		}
		if n := other.samples.Load(); n != j.source.Status().Workers["worker-1"].Completed {
			t.Errorf("the worker counts %d samples, the source %+v", n, j.source.Status().Workers["worker-1"])
		}
	})
}

// A worker outlives its source: it waits, and the new source refuses what it still has of the old one.
func TestNewSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := start(t, 50)
		w, line, _ := j.worker("worker-0")
		time.Sleep(5*time.Second + 30*time.Millisecond)
		second := start(t, 50)
		line.to.Store(second.source)
		time.Sleep(10 * time.Second)
		got := second.source.Status()
		if got.Completed < 480 || got.Lost != 0 || got.Duplicates != 0 {
			t.Errorf("account of the new source: %+v", got)
		}
		if w.samples.Load() < 700 {
			t.Errorf("the worker did %d samples in 15 s at 50/s", w.samples.Load())
		}
	})
}

func TestBusyFilesAndStats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		files := []string{filepath.Join(dir, "GPU-1"), filepath.Join(dir, "GPU-2::1")}
		j := start(t, 0)
		w, _, stop := j.worker("worker-0", files...)
		share := func() (shares []float64) {
			for _, f := range files {
				content, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				v, err := strconv.ParseFloat(strings.TrimSuffix(string(content), "\n"), 64)
				if err != nil || !bytes.HasSuffix(content, []byte("\n")) {
					t.Fatalf("%s holds %q, want a number and a newline", f, content)
				}
				shares = append(shares, v)
			}
			return shares
		}
		time.Sleep(2 * time.Second)
		if got := share(); got[0] != 0 || got[1] != 0 {
			t.Errorf("without samples: %v, want 0", got)
		}
		j.rate(300)
		time.Sleep(2 * time.Second)
		if got := share(); got[0] < 0.98 || got[1] < 0.98 {
			t.Errorf("under load: %v, want 1", got)
		}
		page := map[string]float64{}
		for _, s := range w.Stats() {
			page[s.Name] = s.Value
		}
		if page[stats.Samples] < 170 || page[stats.Steps] < 17 || page[stats.StepDuration] != 0.1 || page[stats.ComputeSeconds] < 1.7 || page[stats.DataWaitSeconds] < 2 {
			t.Errorf("stats page %v", page)
		}
		if _, ring := page[stats.WorldSize]; ring {
			t.Error("the page claims a ring")
		}
		stop()
		if got := share(); got[0] != 0 || got[1] != 0 {
			t.Errorf("after the end: %v, want 0", got)
		}
	})
}

func TestHealthz(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := start(t, 10)
		line := wireTo(j.source)
		line.cut.Store(true)
		client, _ := NewClient("http://source", line)
		w, err := NewWorker(WorkerConfig{Name: "w", Source: client, Capacity: 10, Step: 100 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		go w.Run(j.ctx)
		health := func() int {
			r := httptest.NewRecorder()
			w.Handler().ServeHTTP(r, httptest.NewRequest("GET", "/healthz", nil))
			return r.Code
		}
		time.Sleep(5 * time.Second)
		if got := health(); got != http.StatusServiceUnavailable {
			t.Errorf("healthz = %d while the source was never reached", got)
		}
		line.cut.Store(false)
		time.Sleep(5 * time.Second)
		if got := health(); got != http.StatusOK {
			t.Errorf("healthz = %d with a source", got)
		}
	})
}

func TestSourceRefuses(t *testing.T) {
	source, err := NewSource(Config{Rate: 10}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	refuses := func(method, path, body string, status int, want string) {
		t.Helper()
		w := httptest.NewRecorder()
		source.Handler().ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))
		answer, _ := io.ReadAll(w.Body)
		if w.Code != status || !strings.Contains(string(answer), want) {
			t.Errorf("%s %s %.40s = %d %s, want %d with %q", method, path, body, w.Code, answer, status, want)
		}
	}
	refuses("PUT", "/rate", `{"rate":-1}`, 400, "rate -1: want 0 to 1e+06 samples/s")
	refuses("PUT", "/rate", `{}`, 400, "want a body like")
	refuses("PUT", "/rate", `300`, 400, "decode the request")
	refuses("PUT", "/rate", `{"rte":300}`, 400, "unknown field")
	refuses("POST", "/rate", `{"rate":300}`, 405, "")
	refuses("POST", "/pull", `{"worker":"","max":1}`, 400, "worker name")
	refuses("POST", "/pull", `{"worker":"`+strings.Repeat("x", 5000)+`","max":1}`, 400, "too large")
	refuses("POST", "/done", `{"worker":"a","lease":"7","completed":1}`, 400, "want one that /pull gave")
	refuses("POST", "/done", `{"worker":"a","lease":"`+source.run+`-7","completed":1}`, 409, "another worker's")
	refuses("POST", "/done", `{"worker":"a","lease":"0000-7","completed":1}`, 409, "another worker's")
}

func TestNewWorkerRefuses(t *testing.T) {
	for want, cfg := range map[string]WorkerConfig{
		"worker name of 0 bytes": {Capacity: 1, Step: time.Second},
		"capacity 0.5":           {Name: "w", Capacity: 0.5, Step: time.Second},
		"step 2s: want 1ms":      {Name: "w", Capacity: 1, Step: 2 * time.Second},
	} {
		if _, err := NewWorker(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("NewWorker(%+v) = %v, want %q", cfg, err, want)
		}
	}
	if _, err := NewClient("mnist-training-source:8080", nil); err == nil {
		t.Error("an address without http:// was taken")
	}
}

func TestBusyFiles(t *testing.T) {
	is := func(value string, want ...string) {
		t.Helper()
		got, err := BusyFiles(value)
		if err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("BusyFiles(%q) (-want +got):\n%s", value, diff)
		}
	}
	is("")
	is("/fakegpu/busy/GPU-1", "/fakegpu/busy/GPU-1")
	is("/fakegpu/busy/GPU-1::1:/fakegpu/busy/GPU-2::0", "/fakegpu/busy/GPU-1::1", "/fakegpu/busy/GPU-2::0")
	if got, err := BusyFiles("busy/GPU-1"); err == nil {
		t.Errorf("a relative path was taken as %q", got)
	}
}

func FuzzBusyFiles(f *testing.F) {
	f.Add("/fakegpu/busy/GPU-1::1:/fakegpu/busy/GPU-2")
	f.Add(":/:")
	f.Fuzz(func(t *testing.T, value string) {
		files, err := BusyFiles(value)
		if err != nil {
			return
		}
		for _, file := range files {
			if !strings.HasPrefix(file, "/") {
				t.Errorf("BusyFiles(%q) has %q", value, file)
			}
		}
		if got := strings.Join(files, ":"); got != value {
			t.Errorf("BusyFiles(%q) joins to %q", value, got)
		}
	})
}

func ExampleStatus() {
	now := time.Unix(0, 0)
	s, _ := New(Config{Rate: 100}, now)
	s.Pull("worker-0", 10, now)
	s.Tick(now.Add(time.Second))
	status := s.Status(now.Add(time.Second))
	fmt.Println(status.Offered, status.Backlog, status.Leased)
	// Output: 100 90 10
}
