// Command exporter measures capstan-exporter against its budgets: the program as it is shipped, with the simulated driver (8
// GPUs) behind a real dlopen, and a kubelet's two sockets with 100 pods. It writes bench/exporter.json and prints a table.
//
// The 100,000 cycles are not waited for: they run in a tight loop, in a process with the same packages, while pods come and go.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/test/bench/report"
)

const (
	gpus    = 8
	allPods = 100
)

func main() {
	out := flag.String("out", "bench/exporter.json", "write the figures to this file")
	duration := flag.Duration("duration", time.Minute, "measure CPU for so long")
	cycles := flag.Int("cycles", 100_000, "readings of the accelerated run")
	soak := flag.String("soak", "", "internal: be the accelerated run, with this kubelet folder")
	bare := flag.Bool("bare", false, "internal: be the server that does nothing")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	switch {
	case *soak != "":
		err = beSoak(ctx, *soak)
	case *bare:
		err = beBare(ctx)
	default:
		err = measure(ctx, *out, *duration, *cycles)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench exporter:", err)
		os.Exit(1)
	}
}

// measure runs everything and writes the report.
func measure(ctx context.Context, out string, duration time.Duration, cycles int) error {
	root, err := filepath.Abs(".")
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(root, "test/fakegpu/lib")); err != nil {
		return errors.New("run it in the repository's root: go run ./test/bench/exporter")
	}
	dir, err := os.MkdirTemp("", "capstan-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	d, err := makeDriver(ctx, root, dir, gpus, "h100")
	if err != nil {
		return err
	}
	program := filepath.Join(dir, "capstan-exporter")
	build := exec.CommandContext(ctx, "go", "build", "-ldflags", "-s -w -extldflags=-Wl,-z,lazy", "-o", program, "./cmd/capstan-exporter")
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if output, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the exporter: %w\n%s", err, output)
	}
	// Every pod holds a replica, which is the largest page: all pods have series, all of them shared.
	var uuids []string
	for i := range gpus {
		g := d.file.GPU(i)
		uuids = append(uuids, g.UUID())
	}
	sharing := make([][]string, allPods)
	for i := range sharing {
		sharing[i] = []string{fmt.Sprintf("%s::%d", uuids[i%gpus], i/gpus)}
	}
	shared, err := serveKubelet(filepath.Join(dir, "shared"), sharing)
	if err != nil {
		return err
	}
	alone := make([][]string, allPods)
	for i := range gpus {
		alone[i] = uuids[i : i+1]
	}
	exclusive, err := serveKubelet(filepath.Join(dir, "exclusive"), alone)
	if err != nil {
		return err
	}

	divided, err := makeDriver(ctx, root, filepath.Join(dir, "divided"), gpus, "h100-mig")
	if err != nil {
		return err
	}
	var instances [][]string
	for i := range gpus {
		g := divided.file.GPU(i)
		for k := range g.Instances {
			if uuid := g.Instances[k].UUID(); uuid != "" {
				instances = append(instances, []string{uuid})
			}
		}
	}
	parts, err := serveKubelet(filepath.Join(dir, "parts"), instances)
	if err != nil {
		return err
	}

	group, ctx := errgroup.WithContext(ctx)
	working, rest := context.WithCancel(ctx)
	group.Go(func() error { return d.work(working) })
	group.Go(func() error { return divided.work(working) })
	group.Go(func() error {
		defer rest()
		var figures []report.Figure
		for _, part := range []func() ([]report.Figure, error){
			func() ([]report.Figure, error) { return steady(ctx, program, d, shared, duration) },
			func() ([]report.Figure, error) { return mig(ctx, program, divided, parts, len(instances), duration/2) },
			func() ([]report.Figure, error) { return idle(ctx, program, d, exclusive) },
			func() ([]report.Figure, error) { return imageSize(ctx, root, dir) },
			func() ([]report.Figure, error) { return accelerated(ctx, d, shared, cycles) },
		} {
			some, err := part()
			if err != nil {
				return err
			}
			figures = append(figures, some...)
		}
		return report.Write(out, figures)
	})
	return group.Wait()
}

// steady measures the program as the DaemonSet runs it: 1 s sampling, scraped every 5 s, then scraped hard.
func steady(ctx context.Context, program string, d *driver, k *kubelet, duration time.Duration) ([]report.Figure, error) {
	started := time.Now()
	p, err := launch(ctx, d, program, "--listen", "127.0.0.1:0", "--kubelet-dir", k.dir, "--node-name", "bench")
	if err != nil {
		return nil, err
	}
	defer p.end()
	if err := p.until(ctx, metricname.PodGPUBusySeconds, allPods); err != nil {
		return nil, err
	}
	start := time.Since(started)
	fmt.Printf("steady: %d GPUs, %d pods, a scrape every 5 s, for %s\n", gpus, allPods, duration)
	began, calls := time.Now(), d.file.Calls()
	percent, err := p.scraped(ctx, duration)
	if err != nil {
		return nil, err
	}
	rss := p.rss()
	perMinute := float64(d.file.Calls()-calls) / gpus / time.Since(began).Minutes()

	alone, err := p.scraper()
	if err != nil {
		return nil, err
	}
	defer alone.conn.Close()
	var single []time.Duration
	for range 500 {
		took, err := alone.scrape()
		if err != nil {
			return nil, err
		}
		single = append(single, took)
		time.Sleep(10 * time.Millisecond)
	}
	together, err := crowded(ctx, d, p)
	if err != nil {
		return nil, err
	}
	return append([]report.Figure{
		report.AtMost("exporter_cpu_percent", percent, "%", 1, fmt.Sprintf("of a core, 1 s sampling, %d GPUs, %d pods sharing them, over %s", gpus, allPods, duration)),
		report.AtMost("exporter_nvml_calls_per_gpu_minute", perMinute, "calls", 600, "by the library's own count; each pass asks for samples twice, as go-nvml does"),
		report.AtMost("exporter_start_s", start.Seconds(), "s", 5, "from the start of the process to a page with every pod's counters: a pod is certain after a second question"),
		report.AtMost("exporter_metrics_p50_ms", milliseconds(quantile(single, 50)), "ms", 5, "one scraper, 500 scrapes, connection kept"),
		report.AtMost("exporter_metrics_p99_ms", milliseconds(p99(single)), "ms", 5, "one scraper, 500 scrapes, connection kept"),
		report.AtMost("exporter_rss_mib_shipped", rss, "MiB", 40, fmt.Sprintf("the program itself after %s", duration)),
	}, together...), nil
}

// idle measures what a scrape does to the driver, and the size of a page, between two readings that are a minute apart.
func idle(ctx context.Context, program string, d *driver, k *kubelet) ([]report.Figure, error) {
	p, err := launch(ctx, d, program, "--listen", "127.0.0.1:0", "--kubelet-dir", k.dir, "--interval", "4s")
	if err != nil {
		return nil, err
	}
	defer p.end()
	// Right after a reading, so that the next is seconds away.
	if err := p.until(ctx, metricname.PodGPUBusySeconds, gpus); err != nil {
		return nil, err
	}
	calls := d.file.Calls()
	for began := time.Now(); d.file.Calls() == calls; {
		if time.Since(began) > 20*time.Second {
			return nil, errors.New("the exporter makes no call of the simulated library")
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
	time.Sleep(500 * time.Millisecond) // the reading ends
	calls = d.file.Calls()
	scrapes, began := 0, time.Now()
	var page string
	for time.Since(began) < 2500*time.Millisecond {
		if page, err = p.page(); err != nil {
			return nil, err
		}
		scrapes++
		time.Sleep(5 * time.Millisecond)
	}
	inScrape := d.file.Calls() - calls
	series := 0
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, metricname.Prefix) && !strings.HasPrefix(line, metricname.Training) {
			series++
		}
	}
	return []report.Figure{
		report.AtMost("exporter_nvml_calls_in_scrape", float64(inScrape), "calls", 0, fmt.Sprintf("during %d scrapes between two readings, by the library's own count", scrapes)),
		report.AtMost("exporter_series_per_gpu", float64(series)/gpus, "series", 40, fmt.Sprintf("%d capstan_ series of %d GPUs, %d pods of which %d hold one each", series, gpus, allPods, gpus)),
	}, nil
}

// mig measures the program with every GPU in seven instances.
func mig(ctx context.Context, program string, d *driver, k *kubelet, instances int, duration time.Duration) ([]report.Figure, error) {
	p, err := launch(ctx, d, program, "--listen", "127.0.0.1:0", "--kubelet-dir", k.dir, "--node-name", "bench")
	if err != nil {
		return nil, err
	}
	defer p.end()
	if err := p.until(ctx, metricname.PodGPUBusySeconds, instances); err != nil {
		return nil, err
	}
	fmt.Printf("divided: %d GPUs in %d MIG instances, a scrape every 5 s, for %s\n", gpus, instances, duration)
	percent, err := p.scraped(ctx, duration)
	if err != nil {
		return nil, err
	}
	note := fmt.Sprintf("%d MIG instances, a pod on each, over %s", instances, duration)
	return []report.Figure{
		report.AtMost("exporter_cpu_percent_mig", percent, "%", 2, note),
		report.AtMost("exporter_rss_mib_mig", p.rss(), "MiB", 40, note),
	}, nil
}

// scraped asks for the page every five seconds, and says what share of a core the exporter needed meanwhile, in percent.
func (p *process) scraped(ctx context.Context, duration time.Duration) (percent float64, err error) {
	before, began := p.cpu(), time.Now()
	for time.Since(began) < duration {
		if _, err := p.page(); err != nil {
			return 0, err
		}
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(5 * time.Second):
		}
	}
	return 100 * (p.cpu() - before).Seconds() / time.Since(began).Seconds(), nil
}

// imageSize is what a node has to pull.
func imageSize(ctx context.Context, root, dir string) ([]report.Figure, error) {
	build := exec.CommandContext(ctx, "go", "run", "./images", "build", "--out", dir, "exporter")
	build.Dir = root
	out, err := build.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("build the image: %w\n%s", err, out)
	}
	size := regexp.MustCompile(`([0-9.]+) MB`).FindSubmatch(out)
	if size == nil {
		return nil, fmt.Errorf("images build does not say a size:\n%s", out)
	}
	mb, err := strconv.ParseFloat(string(size[1]), 64)
	if err != nil {
		return nil, err
	}
	return []report.Figure{report.AtMost("exporter_image_mb", mb, "MB", 25, "compressed")}, nil
}

func p99(all []time.Duration) time.Duration { return quantile(all, 99) }

func quantile(all []time.Duration, percent int) time.Duration {
	slices.Sort(all)
	return all[len(all)*percent/100]
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
