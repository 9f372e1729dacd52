package adapter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/capstan-gpu/capstan/adapter/api"
	"github.com/capstan-gpu/capstan/adapter/collect"
	"github.com/capstan-gpu/capstan/adapter/store"
	"github.com/capstan-gpu/capstan/adapter/workloads"
	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/reading"
)

// loop makes the ticks. Everything without a comment is only for the goroutine that runs it.
type loop struct {
	cfg       Config
	log       *slog.Logger
	rules     atomic.Pointer[ruleset]    // for all to read
	demand    demand                     // for all
	server    atomic.Pointer[api.Server] // for all: to be told when the rules have changed; nil while there is none
	badRules  string                     // why the newest rules were not taken; "" = they were
	targets   func() []collect.Target
	view      func(metrics []string) *workloads.View
	store     *store.Store
	collector *collect.Collector

	events *events              // nil = none are written
	since  map[string]time.Time // by metric: since when its families are collected
	memory map[key]rules.Memory
	lost   map[key]bool      // workloads whose HPA has no signal, as was last logged
	failed map[string]string // by metric: the newest error of its fleet query that was logged

	table   atomic.Pointer[workloads.Table] // for all; nil before the first tick
	report  atomic.Pointer[report]          // for all
	first   atomic.Pointer[time.Time]       // for all: when the first tick was through; nil before
	started atomic.Pointer[time.Time]       // for all: when the newest tick began; nil before the first
	metrics loopMetrics
}

// key is one rule's view of one workload.
type key struct{ metric, workload string } // the workload's UID

func newLoop(cfg Config, targets func() []collect.Target, view func([]string) *workloads.View) (*loop, error) {
	if _, err := Families(cfg.Rules); err != nil {
		return nil, err
	}
	l := &loop{
		cfg: cfg, log: cfg.Logger.With("component", "tick"), targets: targets, view: view,
		since: map[string]time.Time{}, memory: map[key]rules.Memory{}, lost: map[key]bool{}, failed: map[string]string{},
		metrics: newLoopMetrics(),
	}
	l.store = store.New(store.Config{})
	set := newRuleset(cfg.Rules, l.store)
	l.store.Retain(set.retention(cfg.Interval))
	l.rules.Store(set)
	l.collector = collect.New(collect.Config{
		Store: l.store, FrozenAfter: set.frozenAfter(),
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
	l.reload(start)
	set := l.rules.Load()
	active := l.active(set, l.view(set.names).Asks, start)
	if err := l.keep(set, active, start); err != nil {
		l.log.Error("the rules' families cannot be told", "err", err) // they were checked before they were taken
		return
	}
	l.collector.Collect(ctx, l.targets())
	collected := time.Now()
	l.metrics.stage.WithLabelValues("collect").Observe(collected.Sub(start).Seconds())
	if ctx.Err() != nil {
		return // what is missing is missing because we stop
	}
	l.store.Prune(collected)
	l.evaluate(ctx, set, active, collected)
	l.first.CompareAndSwap(nil, &collected)
	l.metrics.stage.WithLabelValues("evaluate").Observe(time.Since(collected).Seconds())
}

// evaluate makes and publishes the table of a moment, of the rules that are active.
func (l *loop) evaluate(ctx context.Context, set *ruleset, active []bool, now time.Time) {
	ctx, cancel := context.WithTimeout(ctx, max(5*time.Second, l.cfg.Interval))
	defer cancel()
	view := l.view(set.names)
	for _, w := range view.Workloads {
		for i := range w.Pods {
			p := &w.Pods[i]
			p.Ring = l.collector.Rings(p.Node)[p.UID]
		}
	}
	model := func(p rules.Pod) string { return l.collector.Models(p.Node)[p.UID] }
	fleet := reading.NewFleet(view.Workloads, model)

	answers := make([][]rules.Answer, len(set.list))
	memory := make(map[key]rules.Memory, len(l.memory))
	lost := make(map[key]bool, len(l.lost))
	rep := &report{at: now, set: set, active: active}
	changed := changes{events: l.events, now: now}
	for i, rule := range set.list {
		name := set.names[i]
		if !active[i] {
			continue
		}
		var found reading.Found
		wait := set.readers[i].Wait(now.Sub(l.since[name]))
		if wait == nil {
			begin := time.Now()
			found = l.read(ctx, set.readers[i], fleet, now)
			l.metrics.query.WithLabelValues(name).Observe(time.Since(begin).Seconds())
		}
		answers[i] = make([]rules.Answer, len(view.Workloads))
		for j, w := range view.Workloads {
			k := key{rule.Metric, w.UID}
			a, m := rules.Answer{Err: wait}, l.memory[k]
			if wait == nil {
				a, m = found.Decide(rule, w, l.memory[k], now)
			}
			answers[i][j], memory[k] = a, m
			asked := view.Asked(w.Namespace, w.Name, name)
			rep.add(name, w, a, asked, found)
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
	l.table.Store(workloads.NewTable(now, view, set.list, answers, model))
}

// read evaluates a rule for the fleet, and counts what was not taken.
func (l *loop) read(ctx context.Context, reader reading.Reader, fleet *reading.Fleet, now time.Time) reading.Found {
	found := reader.Read(ctx, fleet, now)
	name := strings.ToLower(reader.Rule.Metric)
	l.logQuery(name, found.Err)
	if found.Err != nil {
		l.metrics.queryErrors.WithLabelValues(name).Inc()
	}
	l.metrics.discarded.WithLabelValues(name, "node").Add(float64(found.OtherNode))
	l.metrics.discarded.WithLabelValues(name, "duplicate").Add(float64(found.Duplicates))
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
		c.events.on(w, kind, reason, text, c.now)
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

func (l *loop) logQuery(metric string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != l.failed[metric] && (text == "" || l.failed[metric] == "") {
		if text != "" {
			l.log.Error("a rule's query fails for the whole fleet; trying namespace by namespace", "metric", metric, "err", err)
		} else {
			l.log.Info("a rule's query works again", "metric", metric)
		}
	}
	l.failed[metric] = text
}

// Table is the newest; nil before the first.
func (l *loop) Table() *workloads.Table { return l.table.Load() }

// Rules are those that there are now.
func (l *loop) Rules() []rules.Rule { return l.rules.Load().list }

// Ask notes that somebody asks for a metric.
func (l *loop) Ask(metric string) { l.demand.note(metric, time.Now()) }

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
	window := l.rules.Load().longestWindow()
	if age := now.Sub(*first); age < window {
		return fmt.Errorf("measuring for %s of the longest window of %s", age.Round(time.Second), window)
	}
	return nil
}
