package adapter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/capstan-gpu/capstan/adapter/collect"
	"github.com/capstan-gpu/capstan/adapter/engine"
	"github.com/capstan-gpu/capstan/adapter/store"
	"github.com/capstan-gpu/capstan/adapter/workloads"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
)

// loop makes the ticks. Everything without a comment is only for the goroutine that runs it.
type loop struct {
	cfg       Config
	log       *slog.Logger
	names     []string // of the metrics, lower case
	targets   func() []collect.Target
	view      func(metrics []string) *workloads.View
	store     *store.Store
	collector *collect.Collector
	evals     []evaluation // by rule

	events *events // nil = none are written
	memory map[key]rules.Memory
	lost   map[key]bool // workloads whose HPA has no signal, as was last logged
	failed []string     // by rule: the newest error of its fleet query that was logged

	table   atomic.Pointer[workloads.Table] // for all; nil before the first tick
	report  atomic.Pointer[report]          // for all
	first   atomic.Pointer[time.Time]       // for all: when the first tick was through; nil before
	started atomic.Pointer[time.Time]       // for all: when the newest tick began; nil before the first
	metrics loopMetrics
}

// evaluation is how a rule's queries are evaluated.
type evaluation struct {
	value, freshness engine.Func
}

// key is one rule's view of one workload.
type key struct{ metric, workload string } // the workload's UID

func newLoop(cfg Config, targets func() []collect.Target, view func([]string) *workloads.View) (*loop, error) {
	families, err := Families(cfg.Rules)
	if err != nil {
		return nil, err
	}
	l := &loop{
		cfg: cfg, log: cfg.Logger.With("component", "tick"), targets: targets, view: view,
		store:  newStore(cfg),
		memory: map[key]rules.Memory{}, lost: map[key]bool{}, failed: make([]string, len(cfg.Rules)),
		metrics: newLoopMetrics(),
	}
	frozen := time.Duration(1<<63 - 1)
	for _, r := range cfg.Rules {
		frozen = min(frozen, r.MaxAge)
		l.names = append(l.names, strings.ToLower(r.Metric))
		l.evals = append(l.evals, evaluation{
			value:     engine.Embedded(l.store, engine.Config{Lookback: r.MaxAge}),
			freshness: engine.Embedded(l.store, engine.Config{Lookback: max(r.HoldFor, r.MaxAge)}),
		})
	}
	l.collector = collect.New(collect.Config{
		Store: l.store, Families: families, FrozenAfter: frozen,
		Timeout: cfg.scrapeTimeout(), Spread: min(time.Second, cfg.Interval/5),
		Transport: cfg.Transport, Logger: cfg.Logger, Registerer: cfg.Registry,
	})
	return l, nil
}

// run ticks until ctx is done. A tick that takes longer than the interval delays the next, and is not caught up with.
func (l *loop) run(ctx context.Context) {
	ticker := time.NewTicker(l.cfg.Interval)
	defer ticker.Stop()
	for {
		l.tick(ctx, time.Now())
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// tick collects, evaluates and publishes.
func (l *loop) tick(ctx context.Context, start time.Time) {
	l.started.Store(&start)
	l.collector.Collect(ctx, l.targets())
	collected := time.Now()
	l.metrics.stage.WithLabelValues("collect").Observe(collected.Sub(start).Seconds())
	if ctx.Err() != nil {
		return // what is missing is missing because we stop
	}
	l.store.Prune(collected)
	l.evaluate(ctx, collected)
	l.first.CompareAndSwap(nil, &collected)
	l.metrics.stage.WithLabelValues("evaluate").Observe(time.Since(collected).Seconds())
}

// evaluate makes and publishes the table of a moment.
func (l *loop) evaluate(ctx context.Context, now time.Time) {
	ctx, cancel := context.WithTimeout(ctx, max(5*time.Second, l.cfg.Interval))
	defer cancel()
	view := l.view(l.names)
	pods := map[string]*rules.Pod{} // by UID
	for _, w := range view.Workloads {
		for i := range w.Pods {
			p := &w.Pods[i]
			p.Ring = l.collector.Rings(p.Node)[p.UID]
			pods[p.UID] = p
		}
	}
	model := func(p rules.Pod) string { return l.collector.Models(p.Node)[p.UID] }

	answers := make([][]rules.Answer, len(l.cfg.Rules))
	memory := make(map[key]rules.Memory, len(l.memory))
	lost := make(map[key]bool, len(l.lost))
	rep := &report{at: now}
	changed := changes{events: l.events, now: now}
	for i, rule := range l.cfg.Rules {
		begin := time.Now()
		found := l.read(ctx, i, view, pods, model, now)
		l.metrics.query.WithLabelValues(l.names[i]).Observe(time.Since(begin).Seconds())
		answers[i] = make([]rules.Answer, len(view.Workloads))
		for j, w := range view.Workloads {
			k := key{rule.Metric, w.UID}
			a, m := rules.Decide(rule, w, found.readings, l.memory[k], now)
			if err := found.failed[w.Namespace]; err != nil && a.Err != nil {
				a.Err = fmt.Errorf("%w; %v", a.Err, err)
			}
			answers[i][j], memory[k] = a, m
			asked := view.Asked(w.Namespace, w.Name, l.names[i])
			rep.add(l.names[i], w, a, asked, found)
			if asked {
				if _, known := l.lost[k]; known || !errors.Is(a.Err, rules.ErrCollecting) { // one that begins is not one that lost it
					lost[k] = a.Err != nil
				}
				changed.note(rule, w, a, l.lost, k)
			}
		}
	}
	l.memory, l.lost = memory, lost // what is gone is forgotten
	changed.log(l.log)
	l.report.Store(rep)
	l.table.Store(workloads.NewTable(now, view, l.cfg.Rules, answers, model))
}

// findings are what the queries of one rule said.
type findings struct {
	readings map[string]rules.Reading // by pod UID
	fresh    map[string]time.Time     // newest sample by pod UID, also of pods without a reading
	failed   map[string]error         // by namespace: its query failed
}

// read evaluates a rule for the fleet; if that fails, namespace by namespace, so that one tenant's data costs nobody else
// the signal.
func (l *loop) read(ctx context.Context, i int, view *workloads.View, pods map[string]*rules.Pod, model func(rules.Pod) string, now time.Time) findings {
	rule, eval := l.cfg.Rules[i], l.evals[i]
	found := findings{make(map[string]rules.Reading, len(pods)), make(map[string]time.Time, len(pods)), map[string]error{}}
	both := func(wrap func(string) (string, error)) (values, ages []engine.Point, err error) {
		query, err := wrap(rule.Query())
		if err != nil {
			return nil, nil, err
		}
		freshness, err := wrap(rule.FreshnessQuery())
		if err != nil {
			return nil, nil, err
		}
		values, err = eval.value(ctx, query, now)
		ages, ageErr := eval.freshness(ctx, freshness, now)
		return values, ages, errors.Join(err, ageErr)
	}

	values, ages, err := both(func(expr string) (string, error) { return expr, nil })
	l.logQuery(i, err)
	if err != nil {
		l.metrics.queryErrors.WithLabelValues(l.names[i]).Inc()
		values, ages = nil, nil
		var namespaces []string
		for _, w := range view.Workloads {
			namespaces = append(namespaces, w.Namespace)
		}
		for _, namespace := range slices.Compact(namespaces) { // the view is sorted
			v, a, err := both(func(expr string) (string, error) { return InNamespace(expr, namespace) })
			if err != nil {
				found.failed[namespace] = fmt.Errorf("the rule's query fails: %w", err)
				continue
			}
			values, ages = append(values, v...), append(ages, a...)
		}
	}

	for _, p := range ages {
		uid := p.Labels.Get(metricname.PodUID)
		at := time.UnixMilli(int64(p.Value * 1000))
		if at.After(found.fresh[uid]) {
			found.fresh[uid] = at
		}
	}
	twice := map[string]bool{}
	models := map[string]map[string]string{} // one map for all pods of a model
	for _, p := range values {
		uid := p.Labels.Get(metricname.PodUID)
		pod, known := pods[uid]
		switch node := p.Labels.Get(metricname.ItemNode); {
		case !known:
			continue // a pod that is no workload's, or that is gone
		case node != "" && node != pod.Node:
			l.metrics.discarded.WithLabelValues(l.names[i], "node").Inc() // an exporter speaks for its own node only
			continue
		}
		if _, had := found.readings[uid]; had {
			twice[uid] = true
		}
		r := rules.Reading{PodUID: uid, Value: p.Value, At: found.fresh[uid]}
		if m := model(*pod); m != "" {
			if models[m] == nil {
				models[m] = map[string]string{metricname.ItemGPUModel: m}
			}
			r.Labels = models[m]
		}
		found.readings[uid] = r
	}
	for uid := range twice { // which of them is right is not known
		l.metrics.discarded.WithLabelValues(l.names[i], "duplicate").Inc()
		delete(found.readings, uid)
	}
	return found
}

// changes are what became of the workloads that HPAs ask for, in one tick.
type changes struct {
	events      *events // nil = none are written
	now         time.Time
	lost, found []string
}

func (c *changes) note(rule rules.Rule, w rules.Workload, a rules.Answer, was map[key]bool, k key) {
	lost, known := was[k]
	name := fmt.Sprintf("%s/%s %s", w.Namespace, w.Name, strings.ToLower(rule.Metric))
	switch {
	case !known && errors.Is(a.Err, rules.ErrCollecting): // it has never had one
	case a.Err != nil && !lost:
		c.lost = append(c.lost, fmt.Sprintf("%s (%v)", name, a.Err))
		c.event(w, corev1.EventTypeWarning, reasonLost, fmt.Sprintf("%s: %v. A HorizontalPodAutoscaler that asks for it keeps the size.", rule.Metric, a.Err))
	case a.Err == nil && (lost || !known):
		c.found = append(c.found, name)
		if known { // it was lost; that a new workload has one is nothing to tell
			c.event(w, corev1.EventTypeNormal, reasonFound, fmt.Sprintf("%s has values again.", rule.Metric))
		}
	}
}

func (c *changes) event(w rules.Workload, kind, reason, text string) {
	if c.events != nil {
		c.events.add(w, kind, reason, text, c.now)
	}
}

// log says who lost the signal and who has it again; of very many, how many and a few.
func (c *changes) log(log *slog.Logger) {
	say := func(level slog.Level, text string, list []string) {
		const few = 10
		rest := 0
		if len(list) > few {
			list, rest = list[:few], len(list)-few
		}
		for _, name := range list {
			log.Log(context.Background(), level, text, "workload", name)
		}
		if rest > 0 {
			log.Log(context.Background(), level, text, "more", rest)
		}
	}
	say(slog.LevelWarn, "a workload has no signal: its HorizontalPodAutoscaler holds", c.lost)
	say(slog.LevelInfo, "a workload has its signal", c.found)
}

func (l *loop) logQuery(i int, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != l.failed[i] && (text == "" || l.failed[i] == "") {
		if text != "" {
			l.log.Error("a rule's query fails for the whole fleet; trying namespace by namespace", "metric", l.names[i], "err", err)
		} else {
			l.log.Info("a rule's query works again", "metric", l.names[i])
		}
	}
	l.failed[i] = text
}

// alive says why the adapter is stuck, if it is. Before the first tick it waits for the API server, and a restart would
// not help.
func (l *loop) alive(now time.Time) error {
	started := l.started.Load()
	if started == nil {
		return nil
	}
	if age := now.Sub(*started); age > l.cfg.patience() {
		return fmt.Errorf("the newest tick began %s ago; it should every %s", age.Round(time.Second), l.cfg.Interval)
	}
	return nil
}

// ready says what is missing until values speak for a whole window: another replica has them.
func (l *loop) ready(now time.Time) error {
	first := l.first.Load()
	if first == nil {
		return errors.New("the first tick is not through")
	}
	window := time.Duration(0)
	for _, r := range l.cfg.Rules {
		window = max(window, r.Window)
	}
	if age := now.Sub(*first); age < window {
		return fmt.Errorf("measuring for %s of the longest window of %s", age.Round(time.Second), window)
	}
	return nil
}
