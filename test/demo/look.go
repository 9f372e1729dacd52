package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/capstan-gpu/capstan/test/rig"
)

// look takes one sight of the job: the source, the StatefulSet, the metric that the adapter serves, the HPA.
// An unanswered metric is part of the sight; anything else that cannot be read is an error.
func look(ctx context.Context, c *rig.Cluster, began time.Time) (Sight, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	now := Sight{At: time.Since(began)}
	stream, err := c.Stream(ctx, namespace)
	if err != nil {
		return now, err
	}
	now.Rate, now.Backlog, now.Done, now.Lost = stream.Rate, stream.Backlog, stream.Completed, stream.Lost
	set, err := c.Clients.AppsV1().StatefulSets(namespace).Get(ctx, rig.WorkerSet, metav1.GetOptions{})
	if err != nil {
		return now, fmt.Errorf("read the worker StatefulSet: %w", err)
	}
	now.Workers = int(set.Status.ReadyReplicas)
	hpa, err := c.HPA(ctx, namespace, rig.ArticleHPA)
	if err != nil {
		return now, fmt.Errorf("read the HPA: %w", err)
	}
	now.Desired = int(hpa.Status.DesiredReplicas)
	now.Read, now.ReadOK = rig.Average(hpa)
	if status, _, message := rig.Condition(hpa, "ScalingActive"); status == "False" {
		now.ReadOK = false
		now.MetricError = message
	}
	items, err := c.External(ctx, namespace, rig.Metric, "")
	if err != nil {
		now.MetricError = firstLine(err.Error())
		return now, nil
	}
	now.MetricError = ""
	rig.SortByOrdinal(items)
	for _, item := range items {
		now.Utilization = append(now.Utilization, float64(item.Value.MilliValue())/1000)
		now.Held = now.Held || item.MetricLabels["held"] == "true"
	}
	return now, nil
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}
