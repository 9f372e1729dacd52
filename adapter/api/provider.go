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
	p.source.Ask(strings.ToLower(info.Metric))
	table := p.source.Table()
	if table == nil {
		return nil, unavailable("no measurement yet: this adapter has just started")
	}
	if age := p.now().Sub(table.At); age > p.maxAge {
		return nil, unavailable(fmt.Sprintf("the newest measurement is %s old: this adapter does not keep up", age.Round(time.Second)))
	}
	items, rule, err := table.Lookup(namespace, info.Metric, selector)
	switch {
	case errors.Is(err, workloads.ErrUnknownMetric):
		return nil, status(http.StatusNotFound, metav1.StatusReasonNotFound, err.Error())
	case errors.Is(err, workloads.ErrNothing):
		return nil, status(http.StatusNotFound, metav1.StatusReasonNotFound, err.Error())
	case errors.Is(err, workloads.ErrAmbiguous):
		return nil, status(http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error())
	case err != nil:
		return nil, unavailable(err.Error())
	}

	list := &external_metrics.ExternalMetricValueList{Items: make([]external_metrics.ExternalMetricValue, len(items))}
	name := strings.ToLower(rule.Metric)
	window := int64(math.Ceil(rule.Window.Seconds()))
	for i, it := range items {
		milli := math.Round(it.Value * 1000)
		// The policy lets no such value pass; a quantity made of one would be a wrong number instead of an error.
		if !(milli >= 0 && milli < 1<<53) {
			return nil, unavailable(fmt.Sprintf("the value of %s is %g", labels.Set(it.Labels), it.Value))
		}
		list.Items[i] = external_metrics.ExternalMetricValue{
			MetricName:    name,
			MetricLabels:  it.Labels,
			Timestamp:     metav1.NewTime(it.At),
			WindowSeconds: &window,
			Value:         *resource.NewMilliQuantity(int64(milli), resource.DecimalSI),
		}
		if it.At.IsZero() {
			list.Items[i].Timestamp = metav1.NewTime(table.At) // the library measures the age of each
		}
	}
	return list, nil
}

func unavailable(text string) error {
	return status(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable, text)
}

func status(code int32, reason metav1.StatusReason, text string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: code, Reason: reason, Message: text}}
}
