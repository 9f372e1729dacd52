package api

import (
	"context"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/metrics/pkg/apis/custom_metrics"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/provider"

	"github.com/capstan-gpu/capstan/rules"
)

// podProvider answers requests for metrics of pods, of custom.metrics.k8s.io, from the same table. It implements the library's
// CustomMetricsProvider. Where the external API gives a whole vector or an error, this one gives the values that there are: the HPA knows
// which pods it asked for, and treats a missing one as idle when it would scale up and as at its target when it would scale down.
type podProvider struct{ *Provider }

var _ provider.CustomMetricsProvider = podProvider{}

var pods = schema.GroupResource{Resource: "pods"}

// ListAllMetrics lists the metrics that are per pod.
func (p podProvider) ListAllMetrics() (out []provider.CustomMetricInfo) {
	for _, r := range p.source.Rules() {
		if r.Per == rules.PerPod {
			out = append(out, provider.CustomMetricInfo{GroupResource: pods, Namespaced: true, Metric: strings.ToLower(r.Metric)})
		}
	}
	return out
}

// GetMetricByName gives the value of one pod.
func (p podProvider) GetMetricByName(_ context.Context, name types.NamespacedName, info provider.CustomMetricInfo, items labels.Selector) (*custom_metrics.MetricValue, error) {
	requirement, err := labels.NewRequirement(appsv1.StatefulSetPodNameLabel, selection.Equals, []string{name.Name})
	if err != nil {
		return nil, status(400, metav1.StatusReasonBadRequest, fmt.Sprintf("%q is no name of a pod: %v", name.Name, err))
	}
	list, err := p.of(name.Namespace, labels.NewSelector().Add(*requirement), info, items)
	if err != nil {
		return nil, err
	}
	return &list.Items[0], nil
}

// GetMetricBySelector gives the values of the pods that a selector of their labels selects, at least one.
func (p podProvider) GetMetricBySelector(_ context.Context, namespace string, selector labels.Selector, info provider.CustomMetricInfo, items labels.Selector) (*custom_metrics.MetricValueList, error) {
	return p.of(namespace, selector, info, items)
}

func (p podProvider) of(namespace string, selector labels.Selector, info provider.CustomMetricInfo, items labels.Selector) (*custom_metrics.MetricValueList, error) {
	if info.GroupResource != pods || !info.Namespaced {
		return nil, status(404, metav1.StatusReasonNotFound, fmt.Sprintf("there are metrics of pods of a namespace only, not of %s", info.GroupResource))
	}
	table, err := p.newest(info.Metric)
	if err != nil {
		return nil, err
	}
	found, rule, err := table.Pods(namespace, info.Metric, selector, items)
	if err != nil {
		return nil, statusOf(err)
	}
	list := &custom_metrics.MetricValueList{Items: make([]custom_metrics.MetricValue, len(found))}
	window := windowOf(rule)
	for i, it := range found {
		value, err := quantity(it.Item)
		if err != nil {
			return nil, err
		}
		list.Items[i] = custom_metrics.MetricValue{
			DescribedObject: custom_metrics.ObjectReference{Kind: "Pod", APIVersion: "/v1", Namespace: namespace, Name: it.Pod},
			Metric:          custom_metrics.MetricIdentifier{Name: strings.ToLower(rule.Metric)},
			Timestamp:       taken(it.Item, table),
			WindowSeconds:   &window,
			Value:           *value,
		}
	}
	return list, nil
}
