// Package adapter turns what the exporters say into what the HorizontalPodAutoscaler gets.
//
// Once an interval a tick collects all exporters' pages into the store, evaluates every rule for the whole fleet, lets
// the policy decide workload by workload, and publishes the result as an immutable table. Requests are look-ups in the
// newest table and cause no work.
//
// The package wires the stages and owns the tick. What a value is, is the rules' business; which values may be served,
// the policy's.
package adapter

import (
	"cmp"
	"context"
	cryptotls "crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	aggregator "k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset"

	"github.com/capstan-gpu/capstan/adapter/api"
	"github.com/capstan-gpu/capstan/adapter/collect"
	"github.com/capstan-gpu/capstan/adapter/tls"
	"github.com/capstan-gpu/capstan/adapter/workloads"
	"github.com/capstan-gpu/capstan/rules"
)

// The APIServices that the adapter can serve. Which of them send requests to it is a matter of the manifests.
const (
	External    = "v1beta1.external.metrics.k8s.io"
	CustomBeta1 = "v1beta1.custom.metrics.k8s.io"
	CustomBeta2 = "v1beta2.custom.metrics.k8s.io"
)

// ScrapeName is in the certificate for those who may ask the exporters besides the adapter. The exporters' configuration names it, too.
const ScrapeName = "capstan-scrape"

// Config of an adapter. Validate says what is missing.
type Config struct {
	Rules    []rules.Rule
	Reload   func() ([]rules.Rule, error) // the rules as they are now, asked before each tick; nil = they do not change
	Interval time.Duration                // between two ticks; 1 s to 1 min

	ExporterNamespace, ExporterService string // whose EndpointSlices name the exporters
	Namespace, Service                 string // the adapter's own, for the certificate's names and the APIService
	Secret                             string // holds CA and certificate
	// In the exporters' namespace: the certificate by which they are known, and one for others who may ask them, such as a Prometheus.
	ExporterSecret, ScrapeSecret string
	APIServices                  []string // that are the adapter's, of External, CustomBeta1 and CustomBeta2: their caBundle is kept right
	Pod                          string   // the adapter's own; events are about it. "" = no events
	CAValidity, CertValidity     time.Duration

	Port     int          // HTTPS
	Listener net.Listener // instead of Port
	// ShutdownDelay is how long it serves on, no longer ready, after it was told to stop.
	ShutdownDelay time.Duration

	Kubeconfig string               // "" = in-cluster
	Client     kubernetes.Interface // nil = by Kubeconfig
	Aggregator aggregator.Interface // nil = by Kubeconfig

	Transport http.RoundTripper    // for scrapes; nil = one of its own
	Registry  *prometheus.Registry // for the adapter's own metrics; nil = a new one. It is served on /metrics
	Version   string               // for the build info
	Logger    *slog.Logger         // nil = slog.Default()
}

// Validate says which field is wrong, with its value, its bound and what to do.
func (c Config) Validate() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Interval < time.Second || c.Interval > time.Minute {
		wrong("interval is %s: it must be from 1s to 1m", c.Interval)
	}
	if len(c.Rules) == 0 {
		wrong("there is no rule: without one, no metric is served")
	}
	for _, r := range c.Rules {
		if r.MaxAge < 2*c.Interval {
			wrong("rule %s: maxAge %s is less than two intervals of %s, so that one lost scrape is an outage: set maxAge to %s, or a shorter interval", r.Metric, r.MaxAge, c.Interval, 3*c.Interval)
		}
		if r.Window < 3*c.Interval {
			wrong("rule %s: window %s is less than three intervals of %s, which is not enough for a rate: set a longer window, or a shorter interval", r.Metric, r.Window, c.Interval)
		}
	}
	for _, f := range []struct{ name, value string }{
		{"exporter namespace", c.ExporterNamespace}, {"exporter service", c.ExporterService},
		{"namespace", c.Namespace}, {"service name", c.Service}, {"TLS secret", c.Secret},
		{"exporters' TLS secret", c.ExporterSecret}, {"scrape TLS secret", c.ScrapeSecret},
	} {
		if f.value == "" {
			wrong("%s is empty", f.name)
		}
	}
	if len(c.APIServices) == 0 {
		wrong("there is no APIService: without one, nobody asks")
	}
	for _, name := range c.APIServices {
		if known := []string{External, CustomBeta1, CustomBeta2}; !slices.Contains(known, name) {
			wrong("APIService %q: there are %s", name, strings.Join(known, ", "))
		}
	}
	if c.CertValidity < 0 || c.CAValidity < 0 || c.CertValidity > 0 && c.CertValidity < time.Minute {
		wrong("certificate validity is %s: it must be at least 1m", c.CertValidity)
	}
	if c.CAValidity > 0 && c.CAValidity < 3*cmp.Or(c.CertValidity, 90*24*time.Hour) {
		wrong("CA validity %s is less than three times the certificate's %s", c.CAValidity, cmp.Or(c.CertValidity, 90*24*time.Hour))
	}
	return errors.Join(errs...)
}

// scrapeTimeout is how long an exporter may take to answer.
func (c Config) scrapeTimeout() time.Duration { return min(2*time.Second, c.Interval/2) }

// patience is how long a tick may be overdue before the adapter counts as stuck, and its table as out of date.
func (c Config) patience() time.Duration { return 4*c.Interval + 10*time.Second }

// Run serves until ctx is done, then for ShutdownDelay more.
//
// It is ready when it has a certificate, knows the workloads and has measured for the longest rule's window. It is alive while ticks begin. An API server that does not answer makes it
// neither: what was last known stands.
func Run(ctx context.Context, cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Registry == nil {
		cfg.Registry = prometheus.NewRegistry()
	}
	if err := cfg.connect(); err != nil {
		return err
	}

	certs := tls.New(tls.Config{
		Client: cfg.Client, Aggregator: cfg.Aggregator,
		Namespace: cfg.Namespace, Secret: cfg.Secret, Service: cfg.Service, APIServices: cfg.APIServices, Pod: cfg.Pod,
		CAValidity: cfg.CAValidity, CertValidity: cfg.CertValidity, Logger: cfg.Logger,
		Handed: []tls.Handed{
			{Namespace: cfg.ExporterNamespace, Secret: cfg.ExporterSecret, Purpose: tls.Purpose{
				Names: tls.Names(cfg.ExporterService, cfg.ExporterNamespace), Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}},
			{Namespace: cfg.ExporterNamespace, Secret: cfg.ScrapeSecret, Purpose: tls.Purpose{
				Names: []string{ScrapeName}, Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}},
		},
	})
	if cfg.Transport == nil {
		name := tls.Names(cfg.ExporterService, cfg.ExporterNamespace)[0]
		cfg.Transport = certs.Client(name, func(c *cryptotls.Config) *http.Transport { return collect.NewTransport(cfg.scrapeTimeout(), c) })
	}
	watcher := workloads.NewWatcher(cfg.Client)
	discovery := collect.NewDiscovery(cfg.Client, cfg.ExporterNamespace, cfg.ExporterService)
	loop, err := newLoop(cfg, discovery.Targets, watcher.View)
	if err != nil {
		return err
	}
	registerRest(cfg, loop, certs)
	loop.events = newEvents(cfg.Client, cfg.Logger.With("component", "events"), cfg.Registry)
	synced := func() error {
		missing := ""
		if ok, what := watcher.Synced(); !ok {
			missing = what
		}
		if !discovery.Synced() {
			missing = strings.TrimPrefix(missing+", EndpointSlices", ", ")
		}
		if missing == "" {
			return nil
		}
		return fmt.Errorf("waiting for the API server's list of %s", missing)
	}

	g, ctx := errgroup.WithContext(ctx)
	background := func(run func(context.Context)) {
		g.Go(func() error { run(ctx); return nil })
	}
	background(certs.Run)
	background(watcher.Run)
	background(discovery.Run)
	background(loop.events.run)
	background(func(ctx context.Context) {
		select {
		case <-ctx.Done():
			return
		case <-certs.Ready(): // without it, no exporter lets us in
		}
		if waitFor(ctx, synced) {
			loop.run(ctx)
		}
	})
	g.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case <-certs.Ready():
		}
		server, err := api.New(api.Config{
			Provider: api.NewProvider(loop, cfg.patience()),
			Cert:     certs, Port: cfg.Port, Listener: cfg.Listener, Kubeconfig: cfg.Kubeconfig,
			Live:          []api.Check{{Name: "tick", Err: func() error { return loop.alive(time.Now()) }}},
			Ready:         []api.Check{{Name: "informers", Err: synced}, {Name: "window", Err: func() error { return loop.ready(time.Now()) }}, {Name: "apiservice", Err: certs.Foreign}},
			ShutdownDelay: cfg.ShutdownDelay,
			Gatherer:      cfg.Registry,
		})
		if err != nil {
			return err
		}
		loop.server.Store(server)
		cfg.Logger.Info("serving", "address", server.Address(), "metrics", loop.rules.Load().names, "interval", cfg.Interval)
		return server.Run(ctx)
	})
	return g.Wait()
}

// connect makes the clients that are not given.
func (c *Config) connect() error {
	if c.Client != nil && c.Aggregator != nil {
		return nil
	}
	var config *rest.Config
	var err error
	if c.Kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	} else {
		config, err = rest.InClusterConfig()
	}
	if err != nil {
		return fmt.Errorf("find the API server: %w", err)
	}
	config.UserAgent = "capstan-adapter/" + cmp.Or(c.Version, "unknown")
	if c.Aggregator == nil {
		if c.Aggregator, err = aggregator.NewForConfig(config); err != nil {
			return err
		}
	}
	if c.Client == nil {
		config := rest.CopyConfig(config)
		config.ContentType = "application/vnd.kubernetes.protobuf"
		config.AcceptContentTypes = config.ContentType + ",application/json"
		if c.Client, err = kubernetes.NewForConfig(config); err != nil {
			return err
		}
	}
	return nil
}

// waitFor waits until check says nothing, and says whether that was before ctx was done.
func waitFor(ctx context.Context, check func() error) bool {
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for check() != nil {
		select {
		case <-ctx.Done():
			return false
		case <-ticker.C:
		}
	}
	return ctx.Err() == nil
}
