package adapter

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/capstan-gpu/capstan/adapter/collect"
	"github.com/capstan-gpu/capstan/adapter/store"
	"github.com/capstan-gpu/capstan/rules"
	"github.com/capstan-gpu/capstan/rules/reading"
)

// reasonRules is the reason of the event on the adapter's own pod that its rule file cannot be taken.
const reasonRules = "RulesNotReloaded"

// ruleset is the rules and what follows from them alone. Immutable.
type ruleset struct {
	list    []rules.Rule
	names   []string         // of the metrics, lower case; by rule
	readers []reading.Reader // by rule
}

func newRuleset(list []rules.Rule, s *store.Store) *ruleset {
	r := &ruleset{list: list}
	for _, rule := range list {
		r.names = append(r.names, strings.ToLower(rule.Metric))
		r.readers = append(r.readers, reading.Embedded(rule, s))
	}
	return r
}

// retention is how far back the store must reach for the rules.
func (r *ruleset) retention(interval time.Duration) time.Duration {
	return reading.Retention(r.list, interval)
}

// frozenAfter is for how long a page may show the same before nobody may use it.
func (r *ruleset) frozenAfter() time.Duration {
	least := r.list[0].MaxAge
	for _, rule := range r.list {
		least = min(least, rule.MaxAge)
	}
	return least
}

// longestWindow is what a new adapter has to wait for.
func (r *ruleset) longestWindow() time.Duration {
	window := time.Duration(0)
	for _, rule := range r.list {
		window = max(window, rule.Window)
	}
	return window
}

// reload takes the rules as they are now, if they can be taken. What was remembered of a metric that is made otherwise is forgotten. A
// file that cannot be taken leaves the rules as they are, and somebody is told once.
func (l *loop) reload(now time.Time) {
	if l.cfg.Reload == nil {
		return
	}
	list, err := l.cfg.Reload()
	if err == nil {
		_, err = Families(list)
	}
	text := ""
	if err != nil {
		text = err.Error()
	}
	if l.metrics.reloadFailed.Set(0); err != nil {
		l.metrics.reloadFailed.Set(1)
		if text != l.badRules {
			l.log.Error("the rules cannot be reloaded; those that were there stand", "err", err)
			l.events.onPod(l.cfg.Namespace, l.cfg.Pod, corev1.EventTypeWarning, reasonRules, fmt.Sprintf("the rules that were there stand: %s", text), now)
		}
		l.badRules = text
		return
	}
	l.badRules = ""
	before := l.rules.Load()
	changed := rules.Compare(before.list, list)
	if slices.Equal(before.list, list) {
		return
	}
	l.log.Info("the rules have changed", "added", changed.Added, "removed", changed.Removed, "other values", changed.Revalued, "other times", changed.Retuned)
	for k := range l.memory {
		if slices.Contains(changed.Removed, k.metric) || slices.Contains(changed.Revalued, k.metric) {
			delete(l.memory, k)
			delete(l.lost, k)
		}
	}
	for _, metric := range changed.Revalued {
		delete(l.since, strings.ToLower(metric))
	}
	next := newRuleset(list, l.store)
	l.store.Retain(next.retention(l.cfg.Interval))
	l.rules.Store(next)
	if server := l.server.Load(); server != nil {
		server.Announce()
	}
}

// active says which rules are evaluated in this tick: those that always are, and those that somebody asks for.
func (l *loop) active(r *ruleset, asked func(metric string) bool, now time.Time) []bool {
	out := make([]bool, len(r.list))
	for i, rule := range r.list {
		out[i] = rule.Collect != rules.Asked || asked(r.names[i]) || l.demand.lately(r.names[i], now)
	}
	return out
}

// keep has the collector ask for what the active rules need, and for nothing more.
func (l *loop) keep(r *ruleset, active []bool, now time.Time) error {
	var list []rules.Rule
	since := map[string]time.Time{}
	for i, rule := range r.list {
		if active[i] {
			list = append(list, rule)
			since[r.names[i]] = cmp.Or(l.since[r.names[i]], now)
		}
	}
	l.since = since
	families, err := Families(list)
	if err != nil {
		return err
	}
	if len(list) == 0 {
		families = collect.Families{}
	}
	l.collector.Keep(families, r.frozenAfter())
	return nil
}
