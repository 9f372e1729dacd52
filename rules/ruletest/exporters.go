package ruletest

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql/parser"

	"github.com/capstan-gpu/capstan/adapter/collect"
	"github.com/capstan-gpu/capstan/adapter/store"
	"github.com/capstan-gpu/capstan/metricname"
	"github.com/capstan-gpu/capstan/rules"
)

// series is what the exporters show, a value at each tick. A value that is omitted is a scrape that failed.
type series struct {
	labels labels.Labels
	values []parser.SequenceValue
}

// line is the series with a value, as it stands on an exporter's page.
func (s series) line(v float64) string {
	var b strings.Builder
	b.WriteString(s.labels.Get(model.MetricNameLabel))
	open := "{"
	s.labels.Range(func(l labels.Label) {
		if l.Name != model.MetricNameLabel {
			fmt.Fprintf(&b, "%s%s=\"%s\"", open, l.Name, escape.Replace(l.Value))
			open = ","
		}
	})
	if open == "," {
		b.WriteString("}")
	}
	return b.String() + " " + strconv.FormatFloat(v, 'g', -1, 64) + "\n"
}

var escape = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

// exporters bring series into a store, as the adapter's collector does.
type exporters struct {
	series []series
	store  *store.Store
	keep   collect.Families
	rings  map[string]*rules.Ring // by pod UID, of the newest scrape that brought something
}

func newExporters(list []series, samples *store.Store) *exporters {
	x := &exporters{series: list, store: samples, keep: collect.Families{}, rings: map[string]*rules.Ring{}}
	for _, s := range list {
		x.keep[s.labels.Get(model.MetricNameLabel)] = true
	}
	return x
}

// scrape takes in the values of a tick: of each node, one page.
func (x *exporters) scrape(tick int, now time.Time) error {
	pages := map[string]string{}
	for _, s := range x.series {
		if tick >= len(s.values) || s.values[tick].Omitted {
			continue
		}
		if v := s.values[tick].Value; value.IsStaleNaN(v) { // what was on the page before and is no longer
			x.store.Append([]store.Sample{{Labels: s.labels, Value: math.Float64frombits(value.StaleNaN), At: now}})
			delete(x.rings, s.labels.Get(metricname.PodUID))
		} else {
			pages[s.labels.Get(metricname.ItemNode)] += s.line(v)
		}
	}
	for node, text := range pages {
		page, err := collect.Decode([]byte(text), node, now, x.keep, math.MaxInt)
		if err != nil {
			return err
		}
		x.store.Append(page.Samples)
		for uid, ring := range page.Rings {
			x.rings[uid] = ring
		}
	}
	return nil
}
