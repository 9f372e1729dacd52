package adapter

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/capstan-gpu/capstan/adapter/tls"
	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/reading"
)

type loopMetrics struct {
	stage       *prometheus.HistogramVec
	query       *prometheus.HistogramVec
	queryErrors *prometheus.CounterVec
	discarded   *prometheus.CounterVec

	reloadFailed prometheus.Gauge
}

func newLoopMetrics() loopMetrics {
	buckets := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	return loopMetrics{
		stage:       prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "capstan_adapter_tick_duration_seconds", Help: "Duration of a tick, by stage.", Buckets: buckets}, []string{"stage"}),
		query:       prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "capstan_adapter_query_duration_seconds", Help: "Time to evaluate a rule for the fleet, once a tick.", Buckets: buckets}, []string{"metric"}),
		queryErrors: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "capstan_adapter_query_errors_total", Help: "Fleet queries that failed and were tried again namespace by namespace."}, []string{"metric"}),
		discarded:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "capstan_adapter_discarded_readings_total", Help: "Readings that were not believed: of a pod on another node than their exporter (node), or several for one pod (duplicate)."}, []string{"metric", "reason"}),

		reloadFailed: prometheus.NewGauge(prometheus.GaugeOpts{Name: "capstan_adapter_rules_reload_failed", Help: "1 = the rules as they are now cannot be taken, so the ones from before stand."}),
	}
}

// registerRest registers the metrics that are not the collector's.
func registerRest(cfg Config, l *loop, certs *tls.Manager) {
	r := cfg.Registry
	r.MustRegister(l.metrics.stage, l.metrics.query, l.metrics.queryErrors, l.metrics.discarded, l.metrics.reloadFailed, &reportCollector{l})
	gauge := func(name, help string, f func() float64) {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f))
	}
	counter := func(name, help string, f func() float64) {
		r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, f))
	}
	gauge("capstan_adapter_store_series", "Series in the window.", func() float64 { return float64(l.store.Stats().Series) })
	gauge("capstan_adapter_store_samples", "Samples in the window.", func() float64 { return float64(l.store.Stats().Samples) })
	counter("capstan_adapter_store_rejected_samples_total", "Samples that the store did not take: too many series, out of order, or one of that time already.", func() float64 {
		s := l.store.Stats()
		return float64(s.OverLimit + s.Duplicates + s.OutOfOrder)
	})
	if certs != nil {
		gauge("capstan_adapter_certificate_expiry_timestamp_seconds", "Unix time at which the served certificate ends; 0 = there is none.", func() float64 {
			if end := certs.Expiry(); !end.IsZero() {
				return float64(end.Unix())
			}
			return 0
		})
		for _, name := range cfg.APIServices {
			r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "capstan_adapter_apiservice_foreign", Help: "1 = another product owns the APIService, so that nobody asks this adapter by it.",
				ConstLabels: prometheus.Labels{"apiservice": name}}, func() float64 {
				if certs.ForeignOne(name) != nil {
					return 1
				}
				return 0
			}))
		}
	}
	r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "capstan_adapter_build_info", Help: "1; the version in a label.",
		ConstLabels: prometheus.Labels{"version": cfg.Version}}, func() float64 { return 1 }))
}

// report is what a tick says about each workload that an HPA asks for, and counts of all. Immutable once stored.
type report struct {
	at     time.Time
	set    *ruleset
	active []bool            // by rule: it was evaluated
	states map[[2]string]int // metric and state ─► workloads
	rows   []row
}

type row struct {
	metric, namespace, workload string
	up                          bool
	ready, reporting, held      int
	newest                      time.Time
}

// add takes in one answer.
func (r *report) add(metric string, w rules.Workload, a rules.Answer, asked bool, found reading.Found) {
	if r.states == nil {
		r.states = map[[2]string]int{}
	}
	out := row{metric: metric, namespace: w.Namespace, workload: w.Name, up: a.Err == nil}
	for _, it := range a.Items {
		if it.Held {
			out.held++
		}
	}
	r.states[[2]string{metric, stateOf(a, out.held)}]++
	if !asked {
		return
	}
	for _, p := range w.Pods {
		if p.GPUs > 0 && p.Ready && !p.Terminating {
			out.ready++
		}
		if _, ok := found.Readings[p.UID]; ok {
			out.reporting++
		}
		if at := found.Fresh[p.UID]; at.After(out.newest) {
			out.newest = at
		}
	}
	r.rows = append(r.rows, out)
}

// stateOf is an answer in one word.
func stateOf(a rules.Answer, held int) string {
	switch {
	case errors.Is(a.Err, rules.ErrEnded):
		return "ended"
	case errors.Is(a.Err, rules.ErrNotStepping):
		return "not_stepping"
	case errors.Is(a.Err, rules.ErrNoPods):
		return "no_pods"
	case errors.Is(a.Err, rules.ErrNoneReady):
		return "none_ready"
	case errors.Is(a.Err, rules.ErrMissing):
		return "missing"
	case errors.Is(a.Err, rules.ErrCollecting):
		return "collecting"
	case a.Err != nil:
		return "error"
	case held > 0:
		return "held"
	}
	return "served"
}

var states = []string{"served", "held", "missing", "collecting", "not_stepping", "none_ready", "no_pods", "ended", "error"}

// reportCollector exposes the newest report.
type reportCollector struct{ loop *loop }

var (
	perWorkload   = []string{"metric", "namespace", "workload"}
	descCollected = prometheus.NewDesc("capstan_adapter_metric_collected", "1 = the metric's rule is evaluated, 0 = nobody asks for it.", []string{"metric"}, nil)
	descState     = prometheus.NewDesc("capstan_adapter_workloads", "Workloads by what their answer is: served, held (an older vector stands), or why it is an error.", []string{"metric", "state"}, nil)
	descSignal    = prometheus.NewDesc("capstan_adapter_workload_signal", "1 = the HorizontalPodAutoscaler that asks for this workload's metric gets values, 0 = it gets an error.", perWorkload, nil)
	descPods      = prometheus.NewDesc("capstan_adapter_workload_pods", "Pods of a workload: ready with a GPU, reporting a value, or with a held one.", append(perWorkload[:3:3], "state"), nil)
	descAge       = prometheus.NewDesc("capstan_adapter_workload_sample_age_seconds", "Age of the newest sample of any of the workload's pods; absent when there is none.", perWorkload, nil)
	descTick      = prometheus.NewDesc("capstan_adapter_tick_timestamp_seconds", "Unix time of the newest evaluation.", nil, nil)
	descriptions  = []*prometheus.Desc{descCollected, descState, descSignal, descPods, descAge, descTick}
)

func (c *reportCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range descriptions {
		ch <- d
	}
}

func (c *reportCollector) Collect(ch chan<- prometheus.Metric) {
	r := c.loop.report.Load()
	if r == nil {
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(descTick, float64(r.at.UnixMilli())/1000)
	for i, metric := range r.set.names {
		collected := 0.0
		if r.active[i] {
			collected = 1
		}
		gauge(descCollected, collected, metric)
		for _, state := range states {
			gauge(descState, float64(r.states[[2]string{metric, state}]), metric, state)
		}
	}
	for _, row := range r.rows {
		up := 0.0
		if row.up {
			up = 1
		}
		gauge(descSignal, up, row.metric, row.namespace, row.workload)
		gauge(descPods, float64(row.ready), row.metric, row.namespace, row.workload, "ready")
		gauge(descPods, float64(row.reporting), row.metric, row.namespace, row.workload, "reporting")
		gauge(descPods, float64(row.held), row.metric, row.namespace, row.workload, "held")
		if !row.newest.IsZero() {
			gauge(descAge, time.Since(row.newest).Seconds(), row.metric, row.namespace, row.workload)
		}
	}
}
