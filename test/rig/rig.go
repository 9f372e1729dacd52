// Package rig is what the end-to-end tests and the demonstration do to a real cluster: install the bundle, drive the
// simulated GPUs, read what the HPA reads. It decides nothing and asserts nothing; its callers do.
package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/metrics/pkg/apis/external_metrics/v1beta1"
)

// Where the bundle puts its parts; the contract of deploy/.
const (
	SystemNamespace = "capstan-system"
	NodeNamespace   = "capstan-node"
	WorkerSet       = "mnist-training-worker"
	SourceService   = "mnist-training-source"
	ArticleHPA      = "tf-worker-hpa"
	Metric          = "gpu_utilization"
)

// Cluster is a Kubernetes that tests may do anything to. Safe for concurrent use.
type Cluster struct {
	Kubeconfig string
	Registry   string // where the nodes take the images from, "" for the names in deploy/
	Clients    kubernetes.Interface
	Config     *rest.Config

	root    string // of the repository
	kubectl string // path of the program
}

// Open connects to the cluster that kubeconfig names. kubectl is the path of the program to use, "" for the one on PATH.
func Open(kubeconfig, kubectl string) (*Cluster, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig %s: %w", kubeconfig, err)
	}
	config.QPS, config.Burst = 50, 100
	clients, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make a client from %s: %w", kubeconfig, err)
	}
	root, err := Root()
	if err != nil {
		return nil, err
	}
	if kubectl == "" {
		kubectl = "kubectl"
	}
	return &Cluster{Kubeconfig: kubeconfig, Clients: clients, Config: config, root: root, kubectl: kubectl}, nil
}

// Root is the repository's folder: the nearest one above the working directory that holds the module's go.mod and deploy/.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		_, mod := os.Stat(filepath.Join(d, "go.mod"))
		_, deploy := os.Stat(filepath.Join(d, "deploy", "base"))
		if mod == nil && deploy == nil {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("no repository above %s: run it inside a checkout of Capstan", dir)
		}
	}
}

// Path of a file or folder of the repository.
func (c *Cluster) Path(elements ...string) string {
	return filepath.Join(append([]string{c.root}, elements...)...)
}

// Kubectl runs kubectl against the cluster and returns what it printed on standard output.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.KubectlInput(ctx, "", args...)
}

// KubectlInput is Kubectl with a text on standard input.
func (c *Cluster) KubectlInput(ctx context.Context, input string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, c.kubectl, append([]string{"--kubeconfig", c.Kubeconfig}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.Stdin = &out, &errs, strings.NewReader(input)
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(errs.String()))
	}
	return out.String(), nil
}

// Until calls check about twice a second until it says done, and returns its error at once, or one that holds the last
// state when the time is over. state tells a person how far it is.
func Until(ctx context.Context, limit time.Duration, what string, check func(context.Context) (done bool, state string, err error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errTooLong)
	defer cancel()
	state := "nothing seen yet"
	for {
		done, now, err := check(ctx)
		if now != "" {
			state = now
		}
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		if done {
			return nil
		}
		select {
		case <-ctx.Done():
			if errors.Is(context.Cause(ctx), errTooLong) {
				return fmt.Errorf("%s: not so after %s; last seen: %s", what, limit, state)
			}
			return fmt.Errorf("%s: %w; last seen: %s", what, context.Cause(ctx), state)
		case <-time.After(500 * time.Millisecond):
		}
	}
}

var errTooLong = errors.New("took too long")

// Ready waits until a workload of a namespace, like "daemonset/capstan-exporter", is rolled out.
func (c *Cluster) Ready(ctx context.Context, namespace, workload string, limit time.Duration) error {
	if _, err := c.Kubectl(ctx, "-n", namespace, "rollout", "status", workload, "--timeout", limit.String()); err != nil {
		return fmt.Errorf("%w\n%s", err, c.Describe(ctx, namespace))
	}
	return nil
}

// Install applies the bundle with simulated GPUs and waits until the external metrics API answers and every node of the
// cluster offers GPUs. report is told each step.
func (c *Cluster) Install(ctx context.Context, overlay string, report func(string)) error {
	report("applying " + overlay)
	if err := c.ApplyOverlay(ctx, overlay); err != nil {
		return err
	}
	for _, w := range []struct{ namespace, workload string }{
		{NodeNamespace, "daemonset/fakegpu"},
		{NodeNamespace, "daemonset/capstan-exporter"},
		{SystemNamespace, "deployment/capstan-adapter"},
	} {
		report("waiting for " + w.workload)
		if err := c.Ready(ctx, w.namespace, w.workload, 3*time.Minute); err != nil {
			return err
		}
	}
	report("waiting for the external metrics API and for GPUs on every node")
	return Until(ctx, 2*time.Minute, "the external metrics API answers and every node offers GPUs", func(ctx context.Context) (bool, string, error) {
		if _, err := c.Clients.Discovery().ServerResourcesForGroupVersion("external.metrics.k8s.io/v1beta1"); err != nil {
			return false, "external.metrics.k8s.io/v1beta1: " + err.Error(), nil
		}
		nodes, err := c.Clients.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err.Error(), nil
		}
		for _, n := range nodes.Items {
			if gpus := n.Status.Allocatable["nvidia.com/gpu"]; gpus.IsZero() {
				return false, "node " + n.Name + " offers no nvidia.com/gpu", nil
			}
		}
		return true, "", nil
	})
}

// ApplyOverlay applies a kustomize folder, given relative to the repository or absolute, by server-side apply.
func (c *Cluster) ApplyOverlay(ctx context.Context, overlay string) error {
	if !filepath.IsAbs(overlay) {
		overlay = c.Path(overlay)
	}
	if c.Registry == "" {
		_, err := c.Kubectl(ctx, "apply", "--server-side", "-k", overlay)
		return err
	}
	manifests, err := c.Kubectl(ctx, "kustomize", overlay)
	if err != nil {
		return err
	}
	manifests = strings.ReplaceAll(manifests, "ghcr.io/capstan-gpu/", strings.TrimSuffix(c.Registry, "/")+"/")
	_, err = c.KubectlInput(ctx, manifests, "apply", "--server-side", "-f", "-")
	return err
}

// Fakegpu runs the fakegpu command on a node's simulated driver and returns what it printed.
func (c *Cluster) Fakegpu(ctx context.Context, node string, args ...string) (string, error) {
	pod, err := c.PodOn(ctx, NodeNamespace, "app.kubernetes.io/name=fakegpu", node)
	if err != nil {
		return "", err
	}
	return c.Kubectl(ctx, append([]string{"-n", NodeNamespace, "exec", pod.Name, "--", "fakegpu"}, args...)...)
}

// PodOn returns the pod with these labels that runs on a node.
func (c *Cluster) PodOn(ctx context.Context, namespace, labels, node string) (*corev1.Pod, error) {
	pods, err := c.Clients.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: labels, FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		return nil, err
	}
	for i := range pods.Items {
		if pods.Items[i].DeletionTimestamp == nil {
			return &pods.Items[i], nil
		}
	}
	return nil, fmt.Errorf("find a pod %s of namespace %s on %s: there is none", labels, namespace, node)
}

// Nodes names the cluster's nodes in order.
func (c *Cluster) Nodes(ctx context.Context) ([]string, error) {
	nodes, err := c.Clients.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, n := range nodes.Items {
		names = append(names, n.Name)
	}
	sort.Strings(names)
	return names, nil
}

// External reads an external metric as the HPA does. selector may be empty.
func (c *Cluster) External(ctx context.Context, namespace, metric, selector string) ([]v1beta1.ExternalMetricValue, error) {
	request := c.Clients.Discovery().RESTClient().Get().AbsPath("apis/external.metrics.k8s.io/v1beta1/namespaces", namespace, metric)
	if selector != "" {
		request = request.Param("labelSelector", selector)
	}
	raw, err := request.Do(ctx).Raw()
	if err != nil {
		// The discovery client does not decode a Status, which holds what the adapter has to say.
		var status metav1.Status
		if json.Unmarshal(raw, &status) == nil && status.Kind == "Status" {
			return nil, &apierrors.StatusError{ErrStatus: status}
		}
		return nil, err
	}
	var list v1beta1.ExternalMetricValueList
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("decode %s of namespace %s: %w", metric, namespace, err)
	}
	return list.Items, nil
}

// HPA is one look at a HorizontalPodAutoscaler.
func (c *Cluster) HPA(ctx context.Context, namespace, name string) (*autoscalingv2.HorizontalPodAutoscaler, error) {
	return c.Clients.AutoscalingV2().HorizontalPodAutoscalers(namespace).Get(ctx, name, metav1.GetOptions{})
}

// Average is what an HPA says it read: the sum of all items over the replicas, in percent; ok is false while it read nothing.
func Average(hpa *autoscalingv2.HorizontalPodAutoscaler) (value float64, ok bool) {
	for _, m := range hpa.Status.CurrentMetrics {
		if m.External != nil && m.External.Current.AverageValue != nil {
			return float64(m.External.Current.AverageValue.MilliValue()) / 1000, true
		}
	}
	return 0, false
}

// Condition is the status, reason and message of one of the HPA's conditions; empty where it has none of that type.
func Condition(hpa *autoscalingv2.HorizontalPodAutoscaler, kind autoscalingv2.HorizontalPodAutoscalerConditionType) (status corev1.ConditionStatus, reason, message string) {
	for _, c := range hpa.Status.Conditions {
		if c.Type == kind {
			return c.Status, c.Reason, c.Message
		}
	}
	return "", "", ""
}

// Stream is what the source of samples says of itself.
type Stream struct {
	Rate      float64 `json:"rate"`      // samples/s offered
	Offered   int64   `json:"offered"`   // samples, since its start
	Completed int64   `json:"completed"` // samples, each counted once
	Backlog   int64   `json:"backlog"`   // samples offered and neither completed nor with a worker
	Leased    int64   `json:"leased"`    // samples with a worker
	Lost      int64   `json:"lost"`
}

// Stream asks the source through the API server's proxy.
func (c *Cluster) Stream(ctx context.Context, namespace string) (Stream, error) {
	raw, err := c.Clients.CoreV1().Services(namespace).ProxyGet("http", SourceService, "8080", "status", nil).DoRaw(ctx)
	if err != nil {
		return Stream{}, fmt.Errorf("ask the source of samples: %w", err)
	}
	var s Stream
	if err := json.Unmarshal(raw, &s); err != nil {
		return Stream{}, fmt.Errorf("decode the source's status: %w", err)
	}
	return s, nil
}

// SetRate changes the rate at which the source offers samples, in samples/s.
func (c *Cluster) SetRate(ctx context.Context, namespace string, rate float64) error {
	body, err := json.Marshal(map[string]float64{"rate": rate})
	if err != nil {
		return err
	}
	err = c.Clients.CoreV1().RESTClient().Put().Namespace(namespace).Resource("services").Name("http:"+SourceService+":8080").
		SubResource("proxy").Suffix("rate").SetHeader("Content-Type", "application/json").Body(body).Do(ctx).Error()
	if err != nil {
		return fmt.Errorf("set the source's rate to %g: %w", rate, err)
	}
	return nil
}

// Proxy gets a path from a pod's port through the API server.
func (c *Cluster) Proxy(ctx context.Context, namespace, pod, port, path string) (string, error) {
	raw, err := c.Clients.CoreV1().Pods(namespace).ProxyGet("http", pod, port, path, nil).DoRaw(ctx)
	return string(raw), err
}

// ExporterPage asks an exporter for a page, as one would by hand: its own address answers only who has a certificate.
func (c *Cluster) ExporterPage(ctx context.Context, pod, path string) (string, error) {
	return c.Kubectl(ctx, "-n", NodeNamespace, "exec", pod, "--", "capstan-exporter", "get", path)
}

// Describe is what one looks at first when a namespace does not get ready: its pods, its events, the logs of what fails.
func (c *Cluster) Describe(ctx context.Context, namespace string) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	var b strings.Builder
	for _, args := range [][]string{
		{"-n", namespace, "get", "pods,statefulsets,hpa", "-o", "wide"},
		{"-n", namespace, "get", "events", "--sort-by=.lastTimestamp"},
	} {
		out, err := c.Kubectl(ctx, args...)
		if err != nil {
			out = err.Error()
		}
		fmt.Fprintf(&b, "$ kubectl %s\n%s\n", strings.Join(args, " "), tail(out, 25))
	}
	pods, err := c.Clients.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return b.String()
	}
	for _, p := range pods.Items {
		for _, s := range p.Status.ContainerStatuses {
			if !s.Ready {
				out, err := c.Kubectl(ctx, "-n", namespace, "logs", p.Name, "-c", s.Name, "--tail=15")
				if err != nil {
					out = err.Error()
				}
				fmt.Fprintf(&b, "$ kubectl -n %s logs %s\n%s\n", namespace, p.Name, out)
			}
		}
	}
	return b.String()
}

// tail is the last n lines of a text.
func tail(text string, n int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
