package api

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/metrics/pkg/apis/external_metrics"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/provider"

	"github.com/capstan-gpu/capstan/adapter/workloads"
	"github.com/capstan-gpu/capstan/rules"
)

// Source is where answers come from. Safe for concurrent use.
type Source interface {
	Table() *workloads.Table // of the newest tick; nil before the first
	Rules() []rules.Rule     // that there are now
	Ask(metric string)       // somebody asks for it, lower case
}

// Provider answers requests from the newest table. It implements the library's ExternalMetricsProvider.
type Provider struct {
	source Source
	maxAge time.Duration // of a table
	now    func() time.Time
}

var _ provider.ExternalMetricsProvider = (*Provider)(nil)

// NewProvider makes one. A table that is older than maxAge is not served: whatever keeps the next one from being made,
// its values are no longer what is happening.
func NewProvider(source Source, maxAge time.Duration) *Provider {
	return &Provider{source: source, maxAge: maxAge, now: time.Now}
}

// ListAllExternalMetrics lists the rules' metrics, whether there are values or not. No tenant's name is in it.
func (p *Provider) ListAllExternalMetrics() []provider.ExternalMetricInfo {
	list := p.source.Rules()
	out := make([]provider.ExternalMetricInfo, len(list))
	for i, r := range list {
		out[i].Metric = strings.ToLower(r.Metric)
	}
	return out
}

// GetExternalMetric gives at least one item, or an error that is a Status without Retry-After: client-go would sleep on
// that inside the HPA's worker.
func (p *Provider) GetExternalMetric(_ context.Context, namespace string, selector labels.Selector, info provider.ExternalMetricInfo) (*external_metrics.ExternalMetricValueList, error) {
	table, err := p.newest(info.Metric)
	if err != nil {
		return nil, err
	}
	items, rule, err := table.Lookup(namespace, info.Metric, selector)
	if err != nil {
		return nil, statusOf(err)
	}
	list := &external_metrics.ExternalMetricValueList{Items: make([]external_metrics.ExternalMetricValue, len(items))}
	name, window := strings.ToLower(rule.Metric), windowOf(rule)
	for i, it := range items {
		value, err := quantity(it)
		if err != nil {
			return nil, err
		}
		list.Items[i] = external_metrics.ExternalMetricValue{MetricName: name, MetricLabels: it.Labels, Timestamp: taken(it, table), WindowSeconds: &window, Value: *value}
	}
	return list, nil
}

// newest is the table to answer from. That somebody asks is noted first.
func (p *Provider) newest(metric string) (*workloads.Table, error) {
	p.source.Ask(strings.ToLower(metric))
	table := p.source.Table()
	if table == nil {
		return nil, unavailable("no measurement yet: this adapter has just started")
	}
	if age := p.now().Sub(table.At); age > p.maxAge {
		return nil, unavailable(fmt.Sprintf("the newest measurement is %s old: this adapter does not keep up", age.Round(time.Second)))
	}
	return table, nil
}

// statusOf says by a code who can do something about an error: whoever asks, or nobody but time.
func statusOf(err error) error {
	switch {
	case errors.Is(err, workloads.ErrUnknownMetric), errors.Is(err, workloads.ErrNothing):
		return status(http.StatusNotFound, metav1.StatusReasonNotFound, err.Error())
	case errors.Is(err, workloads.ErrAmbiguous):
		return status(http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error())
	}
	return unavailable(err.Error())
}

// windowOf is a rule's window in whole seconds.
func windowOf(rule rules.Rule) int64 { return int64(math.Ceil(rule.Window.Seconds())) }

// taken is when a value was. The library measures the age of each.
func taken(it workloads.Item, table *workloads.Table) metav1.Time {
	if it.At.IsZero() {
		return metav1.NewTime(table.At)
	}
	return metav1.NewTime(it.At)
}

// quantity is a value in thousandths. The policy lets no value pass that is none; a quantity made of one would be a wrong number instead
// of an error.
func quantity(it workloads.Item) (*resource.Quantity, error) {
	milli := math.Round(it.Value * 1000)
	if !(milli >= 0 && milli < 1<<53) {
		return nil, unavailable(fmt.Sprintf("the value of %s is %g", labels.Set(it.Labels), it.Value))
	}
	return resource.NewMilliQuantity(int64(milli), resource.DecimalSI), nil
}

func unavailable(text string) error {
	return status(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable, text)
}

func status(code int32, reason metav1.StatusReason, text string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: code, Reason: reason, Message: text}}
}
