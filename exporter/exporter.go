// Package exporter measures the GPUs of one node, says which pods hold them, reads what their trainers say, and serves all of
// it as one page for Prometheus and for the adapter.
//
// Three stages run side by side, each on its own clock, and none waits for another: the driver ([Reader]), the kubelet
// (podmap) and the trainers' stats pages (trainer). Each hands what it knows to a board, which publishes an immutable
// [Snapshot]. A scrape renders the newest Snapshot and does no other work: it makes no NVML call and no kubelet call, so a
// stuck driver, kubelet or trainer delays nobody, and is visible as the age of its stage.
//
// What is not known is absent from the page, never 0. The package does not decide what a value means for scaling, keeps no
// history, and has no rights in the API server.
package exporter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/exporter-toolkit/web"
	"golang.org/x/sync/errgroup"

	"github.com/capstan-gpu/capstan/exporter/gpu"
	"github.com/capstan-gpu/capstan/exporter/podmap"
	"github.com/capstan-gpu/capstan/exporter/trainer"
	"github.com/capstan-gpu/capstan/trainer/stats"
)

// Reader reads the node's GPUs. One goroutine calls it. Read blocks as long as the driver does; *gpu.Reader is one.
type Reader interface {
	Read(now time.Time) gpu.Reading
	Close() error
}

// Config is what [Run] needs.
type Config struct {
	Listen              string                             // address of the HTTP server, like ":9401"
	Interval            time.Duration                      // between two readings of the GPUs; 100 ms to 1 min
	KubeletDir          string                             // absolute; the kubelet's --root-dir, /var/lib/kubelet
	MappingInterval     time.Duration                      // between two questions to the kubelet; 1 ms to 1 min, and below 500 ms for tests only: it answers 100 a second for the whole node
	Mapping             func(now time.Time) podmap.Mapping // in place of the kubelet's; nil = ask the kubelet
	MappingMaxAge       time.Duration                      // how long the last good answer of the kubelet stands; MappingInterval to 5 min
	StatsInterval       time.Duration                      // between two reads of a trainer's stats page; 1 s to 5 min
	StuckAfter          time.Duration                      // how long a reading of the GPUs may take before /livez says no; 2 × Interval to 1 h
	GPU                 Reader                             // required; Run closes it
	Registry            *prometheus.Registry               // required; what is in it is served beside what is measured
	Logger              *slog.Logger                       // required
	WebConfig           string                             // path of an exporter-toolkit web configuration (TLS, client certificates, users); "" = plain HTTP
	ProbeListen         string                             // address for /livez and /readyz alone, in plain HTTP, for probes that have no certificate; "" = none
	LocalListen         string                             // loopback address for all pages in plain HTTP, for who is in the container or forwards a port to it; "" = none
	Release             <-chan bool                        // true: let go of the driver until a false comes; nil = never
	PodLabels           []string                           // keys of the labels of pods that hold a GPU to be served, at most 16
	HostNetworkTrainers bool                               // trainers in the host network may have a stats page
	HAMi                bool                               // pods hold the GPUs that HAMi says it gave them
	CompatDCGM          bool                               // also serve the names of dcgm-exporter's default counters
	NodeName            string                             // their label Hostname
	OnListen            func(net.Addr)                     // called once the server listens, may be nil; for tests and port 0
}

// Validate says which field has which value and what would be allowed.
func (c Config) Validate() error {
	var errs []error
	within := func(field string, d, least, most time.Duration) {
		if d < least || d > most {
			errs = append(errs, fmt.Errorf("%s is %s: want %s to %s", field, d, least, most))
		}
	}
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		//lint:ignore ST1005 it begins with a field's name
		errs = append(errs, fmt.Errorf("Listen is %q: want [HOST]:PORT", c.Listen))
	}
	if _, _, err := net.SplitHostPort(c.ProbeListen); c.ProbeListen != "" && err != nil {
		errs = append(errs, fmt.Errorf("ProbeListen is %q: want [HOST]:PORT", c.ProbeListen))
	}
	if host, _, err := net.SplitHostPort(c.LocalListen); c.LocalListen != "" && (err != nil || !net.ParseIP(host).IsLoopback()) {
		errs = append(errs, fmt.Errorf("LocalListen is %q: want 127.0.0.1:PORT or [::1]:PORT, for it asks nobody who he is", c.LocalListen))
	}
	if err := web.Validate(c.WebConfig); err != nil {
		errs = append(errs, fmt.Errorf("WebConfig is %q: %w", c.WebConfig, err))
	}
	if _, err := labelNames(c.PodLabels); err != nil {
		errs = append(errs, fmt.Errorf("PodLabels: %w", err))
	}
	within("Interval", c.Interval, time.Millisecond, time.Minute)
	within("MappingInterval", c.MappingInterval, time.Millisecond, time.Minute)
	within("MappingMaxAge", c.MappingMaxAge, max(c.MappingInterval, time.Second), 5*time.Minute)
	within("StatsInterval", c.StatsInterval, time.Second, 5*time.Minute)
	within("StuckAfter", c.StuckAfter, 2*c.Interval, time.Hour)
	if !filepath.IsAbs(c.KubeletDir) {
		errs = append(errs, fmt.Errorf("KubeletDir is %q: want an absolute path", c.KubeletDir))
	}
	if c.GPU == nil || c.Registry == nil || c.Logger == nil {
		errs = append(errs, errors.New("GPU, Registry and Logger are required"))
	}
	return errors.Join(errs...)
}

// grace is how long Run waits for a driver that does not let go, once it is asked to end. A process that waits for a dead
// driver would be killed after the pod's grace period instead, and the node's GPUs would go unmeasured that much longer.
const grace = 2 * time.Second

// Run measures and serves until ctx is done, and returns nil then. It returns an error when it cannot listen, and one that
// wraps gpu.ErrRestart when only a new process can read the GPUs again. No GPU, no driver, no kubelet are no errors: the page
// and /readyz say so, and they are taken up when they appear.
func Run(ctx context.Context, cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	b := newBoard()
	measured := gatherer{&nodeRenderer{snapshot: b.snapshot, now: time.Now, training: trainingFamilies(stats.Families())}}
	if names, _ := labelNames(cfg.PodLabels); len(names) > 0 {
		measured = append(measured, newPodLabels(b.snapshot, names))
	}
	if cfg.CompatDCGM {
		measured = append(measured, &dcgm{snapshot: b.snapshot, host: cfg.NodeName})
	}
	metrics := newPages(promhttp.HandlerForTransactional(beside(cfg.Registry, measured), promhttp.HandlerOpts{
		EnableOpenMetrics: true,
		ErrorHandling:     promhttp.ContinueOnError, // seven healthy GPUs are not to vanish for the eighth's sake
		ErrorLog:          slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelError),
	}), cfg.Interval)
	group, ctx := errgroup.WithContext(ctx)
	listen := func(address string, h http.Handler, webConfig string, onListen func(net.Addr)) error {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			return fmt.Errorf("listen on %s: %w", address, err)
		}
		if onListen != nil {
			onListen(listener.Addr())
		}
		group.Go(func() error { return serve(ctx, listener, h, webConfig, cfg.Logger) })
		return nil
	}
	if err := listen(cfg.Listen, handler(cfg, b, metrics), cfg.WebConfig, cfg.OnListen); err != nil {
		return err
	}
	if cfg.LocalListen != "" {
		if err := listen(cfg.LocalListen, handler(cfg, b, metrics), "", nil); err != nil {
			return err
		}
	}
	if cfg.ProbeListen != "" {
		if err := listen(cfg.ProbeListen, probes(cfg, b), "", nil); err != nil {
			return err
		}
	}
	group.Go(func() error { metrics.run(ctx, b.wasRead); return nil })
	collect(ctx, group, cfg, b)
	return group.Wait()
}

// serve serves until ctx is done. Which connections it takes is the business of the web configuration, which is read anew for each.
func serve(ctx context.Context, listener net.Listener, h http.Handler, webConfig string, logger *slog.Logger) error {
	server := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(logger.Handler(), slog.LevelDebug),
	}
	ended := make(chan error, 1)
	go func() {
		<-ctx.Done()
		stop, cancel := context.WithTimeout(context.Background(), grace)
		defer cancel()
		if server.Shutdown(stop) != nil {
			ended <- server.Close()
			return
		}
		ended <- nil
	}()
	// Its log is for its own words ("TLS is disabled"), which would come at every start.
	if err := web.Serve(listener, server, &web.FlagConfig{WebConfigFile: &webConfig}, slog.New(slog.DiscardHandler)); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve on %s: %w", listener.Addr(), err)
	}
	return <-ended
}

// collect starts the three stages.
func collect(ctx context.Context, group *errgroup.Group, cfg Config, b *board) {
	group.Go(func() error { return readGPUs(ctx, cfg, b) })
	group.Go(func() error {
		if cfg.Mapping != nil {
			return repeatMapping(ctx, cfg, b)
		}
		return podmap.Run(ctx, podmap.Config{KubeletDir: cfg.KubeletDir, Interval: cfg.MappingInterval, MaxAge: cfg.MappingMaxAge, Labels: cfg.PodLabels, HAMi: cfg.HAMi,
			Asked: func(now time.Time) { b.begin(stagePods, now) }, Answered: func(now time.Time) { b.end(stagePods, now) }, Publish: b.mapped,
			Logger: cfg.Logger.With("stage", "pods")})
	})
	group.Go(func() error {
		return trainer.Run(ctx, trainer.Config{Interval: cfg.StatsInterval, HostNetwork: cfg.HostNetworkTrainers, Pods: b.trainers, Families: stats.Families(),
			Began: func(now time.Time) { b.begin(stageStats, now) }, Ended: b.trained,
			Logger: cfg.Logger.With("stage", "stats")})
	})
}

// repeatMapping publishes the mapping of the configuration, once an interval, until ctx is done.
func repeatMapping(ctx context.Context, cfg Config, b *board) error {
	ticker := time.NewTicker(cfg.MappingInterval)
	defer ticker.Stop()
	for {
		now := time.Now()
		b.begin(stagePods, now)
		b.mapped(cfg.Mapping(now))
		b.end(stagePods, now)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// Once collects for a moment without serving anything, and returns what is known then: at least two readings, and pods if the
// kubelet answers.
func Once(ctx context.Context, cfg Config) (*Snapshot, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	b := newBoard()
	// Two rounds of each stage, since a pod is certain only when nothing changed between two questions.
	ctx, cancel := context.WithTimeout(ctx, 2*max(cfg.Interval, cfg.MappingInterval)+500*time.Millisecond)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	collect(ctx, group, cfg, b)
	err := group.Wait()
	return b.snapshot(), err
}

// readGPUs reads the GPUs until ctx is done. The reading goes on in a goroutine of its own, since a call that the driver does
// not answer cannot be cancelled: it is left behind, for the process to take with it.
func readGPUs(ctx context.Context, cfg Config, b *board) error {
	done := make(chan error, 1)
	go func() {
		err := gpuLoop(ctx, cfg, b)
		if closing := cfg.GPU.Close(); closing != nil {
			cfg.Logger.Warn("let go of the driver", "error", closing)
		}
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(grace):
		cfg.Logger.Warn("the driver still does not answer; ending without it", "waited", grace)
		return nil
	}
}

// gpuLoop reads at once, and then once an interval. The only user of cfg.GPU.
func gpuLoop(ctx context.Context, cfg Config, b *board) error {
	ticker := time.NewTicker(cfg.Interval)
	defer ticker.Stop()
	problem, released := "", false
	for {
		now := time.Now()
		b.begin(stageGPU, now)
		reading := gpu.Reading{At: now, Err: gpu.ErrReleased}
		if !released {
			reading = cfg.GPU.Read(now)
		}
		b.read(time.Now(), reading)
		if errors.Is(reading.Err, gpu.ErrRestart) {
			return fmt.Errorf("read GPUs: %w", reading.Err)
		}
		if p := gpuProblem(reading); p != problem {
			problem = p
			cfg.Logger.Info("what can be read of the GPUs changed", "gpus", len(reading.Devices), "missing", p)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		case released = <-cfg.Release:
			if released {
				if err := cfg.GPU.Close(); err != nil {
					return fmt.Errorf("let go of the driver: %w", err)
				}
			}
		}
	}
}
