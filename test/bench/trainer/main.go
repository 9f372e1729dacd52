// Trainer measures the stand-in trainer as it is built: one source and six workers as processes on this machine's loopback, under
// half a load and under more than they can do, one of them killed. It writes bench/trainer.json. Figures of a ring belong to the
// trainer that has one.
package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/capstan-gpu/capstan/images/image"
	"github.com/capstan-gpu/capstan/test/bench/report"
	"github.com/capstan-gpu/capstan/trainer/stats"
	"github.com/capstan-gpu/capstan/trainer/stream"
)

const (
	workers  = 6
	capacity = 100.0 // samples/s of each
	out      = "bench/trainer.json"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	figures, err := measure(ctx)
	if err == nil {
		err = report.Write(out, figures)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench trainer:", err)
		os.Exit(1)
	}
}

func measure(ctx context.Context) (figures []report.Figure, err error) {
	scratch, err := os.MkdirTemp("", "capstan-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(scratch)
	size, err := imageSize(ctx, scratch)
	if err != nil {
		return nil, err
	}
	program := filepath.Join(scratch, "capstan-trainer")
	if err := run(ctx, "go", "build", "-ldflags", "-s -w", "-o", program, "./cmd/capstan-trainer"); err != nil {
		return nil, err
	}

	job, err := start(ctx, program)
	if err != nil {
		return nil, err
	}
	defer job.end()
	fmt.Fprintln(os.Stderr, "half a load")
	half, err := job.phase(ctx, workers*capacity/2)
	if err != nil {
		return nil, err
	}
	fmt.Fprintln(os.Stderr, "more than they can do")
	full, err := job.phase(ctx, 2*workers*capacity)
	if err != nil {
		return nil, err
	}
	fmt.Fprintln(os.Stderr, "one is killed; the rest catch up")
	account, err := job.kill(ctx)
	if err != nil {
		return nil, err
	}
	return []report.Figure{
		report.AtLeast("stream_throughput_percent", 100*full.samples/(workers*capacity), "% of capacity", 98, "six workers of 100 samples/s, twice that offered"),
		report.AtLeast("stream_busy_under_load_percent", 100*full.busiest[0], "%", 98, "the least busy worker"),
		report.AtMost("stream_busy_spread_percent", 100*(half.busiest[workers-1]-half.busiest[0]), "%", 5, "busiest less least busy worker under half a load"),
		report.AtMost("stream_request_p99_ms", full.p99.Seconds()*1000, "ms", 5, "the source's status, 1,000 times, under that load"),
		report.AtMost("stream_lost_samples", float64(account.Lost), "", 0, fmt.Sprintf("after a kill -9; %d samples in all, %d came back from the killed worker", account.Offered, account.Returned)),
		report.AtMost("stream_duplicate_samples", float64(account.Duplicates), "", 0, ""),
		report.AtMost("trainer_worker_rss_mib", full.rss, "MiB", 24, "the largest of the six"),
		report.AtMost("trainer_cpu_percent", full.cpu, "% of a core", 20, "source and six workers together, under that load"),
		report.AtMost("trainer_image_mb", size/1e6, "MB", 15, "compressed"),
	}, nil
}

// job is a source and its workers as processes.
type job struct {
	client  *stream.Client
	source  *exec.Cmd
	workers []*exec.Cmd
	pages   []string
}

func start(ctx context.Context, program string) (j *job, err error) {
	addresses, err := free(workers + 1)
	if err != nil {
		return nil, err
	}
	j = &job{}
	defer func() {
		if err != nil {
			j.end()
		}
	}()
	if j.client, err = stream.NewClient("http://"+addresses[0], nil); err != nil {
		return nil, err
	}
	j.source = exec.CommandContext(ctx, program, "source", "--rate=0", "--listen="+addresses[0])
	if err := j.source.Start(); err != nil {
		return nil, err
	}
	for i, address := range addresses[1:] {
		w := exec.CommandContext(ctx, program, "worker", "--source=http://"+addresses[0], fmt.Sprintf("--name=worker-%d", i),
			fmt.Sprintf("--capacity=%g", capacity), "--stats-listen="+address)
		if err := w.Start(); err != nil {
			return nil, err
		}
		j.workers = append(j.workers, w)
		j.pages = append(j.pages, "http://"+address+stats.Path)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		s, err := j.client.Status(ctx)
		if err == nil && s.Waiting == workers {
			return j, nil
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return nil, fmt.Errorf("start the job: %d of %d workers pull: %v", s.Waiting, workers, err)
		}
	}
}

func (j *job) end() {
	for _, p := range append(j.workers, j.source) {
		if p != nil && p.Process != nil {
			p.Process.Signal(syscall.SIGTERM)
			p.Wait()
		}
	}
}

// seen is one phase of ten seconds.
type seen struct {
	samples float64   // completed per second
	busiest []float64 // busy shares of the workers, ascending
	p99     time.Duration
	rss     float64 // MiB
	cpu     float64 // percent of a core
}

func (j *job) phase(ctx context.Context, rate float64) (s seen, err error) {
	if err := j.client.SetRate(ctx, rate); err != nil {
		return s, err
	}
	if err := wait(ctx, 3*time.Second); err != nil {
		return s, err
	}
	began := time.Now()
	before, err := j.client.Status(ctx)
	if err != nil {
		return s, err
	}
	busyBefore, at, err := j.busy()
	if err != nil {
		return s, err
	}
	cpuBefore := j.cpu()
	var times []time.Duration
	for range 1000 {
		asked := time.Now()
		if _, err := j.client.Status(ctx); err != nil {
			return s, err
		}
		times = append(times, time.Since(asked))
		if err := wait(ctx, 10*time.Millisecond); err != nil {
			return s, err
		}
	}
	slices.Sort(times)
	s.p99 = times[len(times)*99/100]
	s.cpu = 100 * (j.cpu() - cpuBefore).Seconds() / time.Since(began).Seconds()
	busy, then, err := j.busy()
	if err != nil {
		return s, err
	}
	for i := range busy {
		s.busiest = append(s.busiest, (busy[i]-busyBefore[i])/then[i].Sub(at[i]).Seconds())
	}
	slices.Sort(s.busiest)
	after, err := j.client.Status(ctx)
	if err != nil {
		return s, err
	}
	s.samples = float64(after.Completed-before.Completed) / time.Since(began).Seconds()
	for _, w := range j.workers {
		s.rss = max(s.rss, float64(status(w.Process.Pid, "VmRSS:"))/1024)
	}
	return s, nil
}

// busy reads from each worker's page for how many seconds it computed so far, and when that was.
func (j *job) busy() (seconds []float64, at []time.Time, err error) {
	for _, page := range j.pages {
		response, err := http.Get(page)
		if err != nil {
			return nil, nil, err
		}
		at = append(at, time.Now())
		value := -1.0
		for lines := bufio.NewScanner(response.Body); lines.Scan(); {
			if v, ok := strings.CutPrefix(lines.Text(), stats.ComputeSeconds+" "); ok {
				value, err = strconv.ParseFloat(v, 64)
			}
		}
		response.Body.Close()
		if value < 0 || err != nil {
			return nil, nil, fmt.Errorf("read %s: no %s: %v", page, stats.ComputeSeconds, err)
		}
		seconds = append(seconds, value)
	}
	return seconds, at, nil
}

// kill ends one worker at once, stops the offer, and waits until the others have done all of it.
func (j *job) kill(ctx context.Context) (s stream.Status, err error) {
	last := j.workers[len(j.workers)-1]
	j.workers = j.workers[:len(j.workers)-1]
	if err := last.Process.Kill(); err != nil {
		return s, err
	}
	last.Wait()
	if err := j.client.SetRate(ctx, 0); err != nil {
		return s, err
	}
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); {
		if s, err = j.client.Status(ctx); err != nil {
			return s, err
		}
		if s.Backlog+s.Leased == 0 {
			return s, nil
		}
		if err := wait(ctx, 200*time.Millisecond); err != nil {
			return s, err
		}
	}
	return s, fmt.Errorf("the workers do not catch up: %+v", s)
}

// cpu is what the job's processes used so far.
func (j *job) cpu() (sum time.Duration) {
	for _, p := range append(slices.Clone(j.workers), j.source) {
		content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
		if err != nil {
			continue
		}
		fields := strings.Fields(string(content[bytes.LastIndexByte(content, ')')+1:]))
		for _, f := range fields[11:13] { // utime, stime in hundredths of a second
			ticks, _ := strconv.ParseInt(f, 10, 64)
			sum += time.Duration(ticks) * 10 * time.Millisecond
		}
	}
	return sum
}

// status is a number of kB from /proc/PID/status; 0 when it is not there.
func status(pid int, name string) (kb int64) {
	content, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(content)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			fmt.Sscan(rest, &kb)
		}
	}
	return kb
}

func imageSize(ctx context.Context, scratch string) (bytes float64, err error) {
	if err := run(ctx, "go", "run", "./images", "build", "--out", scratch, "trainer"); err != nil {
		return 0, err
	}
	i, err := tarball.ImageFromPath(filepath.Join(scratch, "trainer.tar"), nil)
	if err != nil {
		return 0, err
	}
	size, err := image.CompressedSize(i)
	return float64(size), err
}

func run(ctx context.Context, name string, args ...string) error {
	if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// free returns n addresses on loopback that nobody listens at.
func free(n int) (addresses []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		addresses = append(addresses, l.Addr().String())
	}
	return addresses, nil
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
