// Command adapter measures capstan-adapter against its budgets: the program as it is shipped, in a process of its own. This
// one plays everything around it on loopback: a kube-apiserver with 10,000 worker pods in 1,000 StatefulSets and as many
// HorizontalPodAutoscalers, an exporter on each of 1,000 nodes, and the HPA controller, which asks for every HPA once in
// 15 s. It writes bench/adapter.json and prints a table.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/capstan-gpu/capstan/adapter/collect"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/test/bench/report"
)

const (
	nodes       = 1000
	gpusPerNode = 8
	podsPerNode = 10 // some share a GPU
	podsPerSet  = 10
	sets        = nodes * podsPerNode / podsPerSet
	namespaces  = 100
	interval    = 15 * time.Second // as recommended above 500 nodes
)

func main() {
	out := flag.String("out", "bench/adapter.json", "write the figures to this file")
	warm := flag.Duration("warm", 150*time.Second, "run so long before measuring: a window, two ticks, and the first handshakes with all exporters")
	duration := flag.Duration("duration", time.Minute, "measure for so long")
	dump := flag.String("metrics", "", "write the adapter's /metrics to this file at the end")
	verbose := flag.Bool("v", false, "show the adapter's log")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := measure(ctx, *out, *dump, *warm, *duration, *verbose); err != nil {
		fmt.Fprintln(os.Stderr, "bench adapter:", err)
		os.Exit(1)
	}
}

func measure(ctx context.Context, out, dump string, warm, duration time.Duration, verbose bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dir, err := os.MkdirTemp("", "capstan-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "capstan-adapter")
	build := exec.CommandContext(ctx, "go", "build", "-ldflags", "-s -w", "-o", program, "./cmd/capstan-adapter")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the adapter (run this in the repository's root): %w\n%s", err, output)
	}

	figures := []report.Figure{decodeThroughput()}
	exporters, err := newExporters()
	if err != nil {
		return err
	}
	kube, err := startCluster(dir, exporters)
	if err != nil {
		return err
	}
	defer kube.Close()
	exporters.serve(ctx, kube.exporterTLS)
	port, err := freePort()
	if err != nil {
		return err
	}
	child := exec.CommandContext(ctx, program, "serve", "--kubeconfig", kube.Kubeconfig, "--secure-port", strconv.Itoa(port), "--interval", interval.String())
	child.Cancel = func() error { return child.Process.Signal(syscall.SIGTERM) }
	var output tail
	child.Stderr = &output
	if verbose {
		child.Stderr = io.MultiWriter(&output, os.Stderr)
	}
	if err := child.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- child.Wait() }()
	hpas := newController(kube, port)
	go hpas.run(ctx)

	fmt.Fprintf(os.Stderr, "%d nodes, %d pods, %d HPAs; warming up for %s, measuring for %s\n", nodes, nodes*podsPerNode, sets, warm, duration)
	if err := sleep(ctx, warm, ended); err != nil {
		return fmt.Errorf("%w\n%s", err, output.String())
	}
	hpas.reset()
	before, err := usage(child.Process.Pid)
	if err != nil {
		return err
	}
	begin, rss := time.Now(), 0.0
	for time.Since(begin) < duration {
		if err := sleep(ctx, time.Second, ended); err != nil {
			return fmt.Errorf("%w\n%s", err, output.String())
		}
		u, err := usage(child.Process.Pid)
		if err != nil {
			return err
		}
		rss = max(rss, u.rssMiB)
	}
	after, err := usage(child.Process.Pid)
	if err != nil {
		return err
	}
	cores := (after.cpu - before.cpu).Seconds() / time.Since(begin).Seconds()
	latency, failures, example := hpas.result()
	page, err := hpas.metrics(ctx)
	if err != nil {
		return err
	}
	if dump != "" {
		if err := os.WriteFile(dump, []byte(page), 0o644); err != nil {
			return err
		}
	}
	stages := stages(page)
	if len(latency) == 0 || failures*100 > len(latency) {
		return fmt.Errorf("%d of %d requests got no value, such as: %s\n%s", failures, len(latency), example, output.String())
	}

	p99 := latency[len(latency)*99/100]
	figures = append(figures,
		report.AtMost("adapter_get_p99_ms", ms(p99), "ms", 10, fmt.Sprintf("%d requests over TLS as the front proxy, selector included; median %.2f ms, %d without a value", len(latency), ms(latency[len(latency)/2]), failures)),
		report.AtMost("adapter_rss_mib_1000_nodes", rss, "MiB", 150, fmt.Sprintf("highest of one a second; peak since its start %.0f MiB", after.peakMiB)),
		report.AtMost("adapter_cores_1000_nodes", cores, "cores", 0.2, fmt.Sprintf("every %s, with %d requests/s; on a machine that plays the exporters, too", interval, sets/15)),
		report.AtMost("adapter_tick_collect_ms", stages["collect"], "ms", 5000, "mean; spread over a second on purpose. The budget is ours, to see it grow"),
		report.AtMost("adapter_tick_evaluate_ms", stages["evaluate"], "ms", 2000, "mean; all rules for 10,000 pods. The budget is ours, to see it grow"),
	)
	if info, err := os.Stat(program); err == nil {
		figures = append(figures, report.AtMost("adapter_binary_mib", float64(info.Size())/(1<<20), "MiB", 85, "stripped"))
	}
	cancel()
	if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("the adapter did not end well: %w\n%s", err, output.String())
	}
	return report.Write(out, figures)
}

// decodeThroughput is of one core, in this process.
func decodeThroughput() report.Figure {
	page := []byte(newPage(0).render(time.Now()))
	keep := collect.Families{metricname.PodGPUBusySeconds: true, metricname.PodGPUObservedSeconds: true}
	begin, n := time.Now(), 0
	for time.Since(begin) < 2*time.Second {
		if _, err := collect.Decode(page, "node", begin, keep, 1000); err != nil {
			panic(err)
		}
		n++
	}
	rate := float64(n*len(page)) / (1 << 20) / time.Since(begin).Seconds()
	return report.AtLeast("adapter_decode_mib_per_s", rate, "MiB/s", 20, fmt.Sprintf("one core, pages of %d KiB; 1,000 of them every 15 s are %.1f MiB/s", len(page)>>10, float64(len(page))*nodes/(1<<20)/15))
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func sleep(ctx context.Context, d time.Duration, ended <-chan error) error {
	select {
	case <-time.After(d):
		return nil
	case err := <-ended:
		return fmt.Errorf("the adapter ended: %v", err)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

type used struct {
	cpu             time.Duration
	rssMiB, peakMiB float64
}

// usage reads what a process has used so far.
func usage(pid int) (used, error) {
	var u used
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return u, err
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	for _, f := range fields[11:13] { // utime and stime, in hundredths of a second
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return u, err
		}
		u.cpu += time.Duration(n) * 10 * time.Millisecond
	}
	status, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, err
	}
	defer status.Close()
	for lines := bufio.NewScanner(status); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) < 2 {
			continue
		}
		kib, _ := strconv.ParseFloat(f[1], 64)
		switch f[0] {
		case "VmRSS:":
			u.rssMiB = kib / 1024
		case "VmHWM:":
			u.peakMiB = kib / 1024
		}
	}
	return u, nil
}

// tail keeps the end of what is written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if extra := len(t.b) - 8<<10; extra > 0 {
		t.b = slices.Delete(t.b, 0, extra)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}

// exporters serves all nodes' pages on one port of many loopback addresses, so that each is a host of its own.
type exporters struct {
	listener net.Listener
	port     int
	pages    []*page
	byHost   map[string]*page
}

// address is the i-th node's.
func address(i int) string { return fmt.Sprintf("127.1.%d.%d", i/250, i%250+1) }

func newExporters() (*exporters, error) {
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		return nil, err
	}
	e := &exporters{listener: l, port: l.Addr().(*net.TCPAddr).Port, byHost: map[string]*page{}}
	for i := range nodes {
		p := newPage(i)
		e.pages = append(e.pages, p)
		e.byHost[net.JoinHostPort(address(i), strconv.Itoa(e.port))] = p
	}
	return e, nil
}

// serve serves until ctx is done, by TLS as its first client wants it.
func (e *exporters) serve(ctx context.Context, config func(*tls.ClientHelloInfo) (*tls.Config, error)) {
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p := e.byHost[r.Host]
		if p == nil {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		io.WriteString(w, p.render(time.Now()))
	}), TLSConfig: &tls.Config{GetConfigForClient: config}, ErrorLog: log.New(io.Discard, "", 0)}
	go func() {
		if err := server.ServeTLS(e.listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			fmt.Fprintln(os.Stderr, "bench adapter: exporters:", err)
		}
	}()
	context.AfterFunc(ctx, func() { server.Close() })
}
