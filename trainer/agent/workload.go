package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// StatefulSet reads it.
func (c *Client) StatefulSet(ctx context.Context) (*appsv1.StatefulSet, error) {
	s, err := c.api.AppsV1().StatefulSets(c.namespace).Get(ctx, c.statefulSet, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read the StatefulSet %s/%s: %w", c.namespace, c.statefulSet, known(err))
	}
	return s, nil
}

// Pods is [Workload]'s. A StatefulSet of the same name with another UID is another job's.
func (c *Client) Pods(ctx context.Context) (ring.Pods, error) {
	s, err := c.StatefulSet(ctx)
	switch {
	case errors.Is(err, ErrNotFound), err == nil && s.UID != c.uid:
		return ring.Pods{}, fmt.Errorf("the StatefulSet %s/%s was deleted", c.namespace, c.statefulSet)
	case err != nil:
		return ring.Pods{}, err
	}
	list, err := c.api.CoreV1().Pods(c.namespace).List(ctx, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(s.Spec.Selector)})
	if err != nil {
		return ring.Pods{}, fmt.Errorf("list the pods of %s/%s: %w", c.namespace, c.statefulSet, err)
	}
	out := ring.Pods{Replicas: 1} // as the API server has it where it is left out
	if s.Spec.Replicas != nil {
		out.Replicas = int(*s.Spec.Replicas)
	}
	for i := range list.Items {
		p := &list.Items[i]
		ordinal := ordinalOf(p.Name)
		if owner := metav1.GetControllerOf(p); owner == nil || owner.UID != c.uid || ordinal < 0 {
			continue
		}
		running, waiting := condition(p)
		out.Pods = append(out.Pods, ring.Pod{Ordinal: ordinal, UID: string(p.UID), Running: running, Waiting: waiting})
	}
	slices.SortFunc(out.Pods, func(a, b ring.Pod) int { return a.Ordinal - b.Ordinal })
	return out, nil
}

// condition says whether a pod's agent can be expected to report; if not, why not.
func condition(p *corev1.Pod) (running bool, waiting string) {
	if p.DeletionTimestamp != nil {
		return false, "it is being deleted"
	}
	for _, s := range p.Status.ContainerStatuses {
		running = running || s.State.Running != nil
	}
	if running {
		return true, ""
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return false, cmp.Or(c.Message, c.Reason)
		}
	}
	for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := s.State.Waiting; w != nil && w.Reason != "" && w.Reason != "PodInitializing" {
			return false, strings.TrimSuffix(w.Reason+": "+w.Message, ": ")
		}
		if t := s.State.Terminated; t != nil && t.ExitCode != 0 {
			return false, fmt.Sprintf("container %s ended with code %d", s.Name, t.ExitCode)
		}
	}
	return false, strings.ToLower(string(p.Status.Phase))
}

// Changes is [Workload]'s.
func (c *Client) Changes(ctx context.Context) (<-chan struct{}, error) {
	s, err := c.StatefulSet(ctx)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(ctx)
	sets, err := c.api.AppsV1().StatefulSets(c.namespace).Watch(ctx, metav1.ListOptions{FieldSelector: named(c.statefulSet)})
	if err != nil {
		stop()
		return nil, fmt.Errorf("watch the StatefulSet %s/%s: %w", c.namespace, c.statefulSet, err)
	}
	pods, err := c.api.CoreV1().Pods(c.namespace).Watch(ctx, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(s.Spec.Selector)})
	if err != nil {
		stop()
		sets.Stop()
		return nil, fmt.Errorf("watch the pods of %s/%s: %w", c.namespace, c.statefulSet, err)
	}
	out := make(chan struct{}, 1)
	var group sync.WaitGroup
	for _, w := range []watch.Interface{sets, pods} {
		group.Go(func() {
			defer stop() // one without the other would be half the truth
			defer w.Stop()
			for {
				select {
				case e, open := <-w.ResultChan():
					if !open || e.Type == watch.Error {
						return
					}
					nudge(out)
				case <-ctx.Done():
					return
				}
			}
		})
	}
	go func() {
		group.Wait()
		stop()
		close(out)
	}()
	return out, nil
}

// ScaleToZero is [Workload]'s. It takes the right to patch statefulsets/scale, and not the StatefulSet.
func (c *Client) ScaleToZero(ctx context.Context) error { return c.Scale(ctx, 0) }

// Scale sets the replicas.
func (c *Client) Scale(ctx context.Context, replicas int) error {
	patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)
	_, err := c.api.AppsV1().StatefulSets(c.namespace).Patch(ctx, c.statefulSet, types.MergePatchType, patch, metav1.PatchOptions{}, "scale")
	if err != nil {
		return fmt.Errorf("scale the StatefulSet %s/%s to %d: %w", c.namespace, c.statefulSet, replicas, known(err))
	}
	return nil
}
