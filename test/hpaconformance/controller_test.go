package hpaconformance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	scalefake "k8s.io/client-go/scale/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/controller/podautoscaler"
	"k8s.io/kubernetes/pkg/controller/podautoscaler/metrics"
	custom "k8s.io/metrics/pkg/apis/custom_metrics/v1beta2"
	external "k8s.io/metrics/pkg/apis/external_metrics/v1beta1"
	resources "k8s.io/metrics/pkg/apis/metrics/v1beta1"
	resourcesfake "k8s.io/metrics/pkg/client/clientset/versioned/fake"
	customfake "k8s.io/metrics/pkg/client/custom_metrics/fake"
	externalfake "k8s.io/metrics/pkg/client/external_metrics/fake"

	"github.com/capstan-gpu/capstan/hpa"
)

const (
	namespace = "training"
	workload  = "web" // the StatefulSet, the HPA, and the first part of the pods' names
	period    = 15 * time.Second
)

// world is a cluster of one workload with one HPA: what the API servers answer, and the package that runs beside the controller.
type world struct {
	flags hpa.Controller

	mu       sync.Mutex // guards all below but client
	spec     hpa.Spec
	size     int32 // the scale's spec.replicas
	lag      int32 // what its status.replicas differ by
	pods     []hpa.Pod
	readings []hpa.Reading

	client *fake.Clientset

	history hpa.History // the package's
	looks   []*look
}

// look is one sync of the controller, and what the package makes of the same.
type look struct {
	at       time.Time
	spec     hpa.Spec
	state    hpa.State
	decision hpa.Decision
	wrote    *int32 // what the controller wrote into the scale; nil = nothing
}

func (w *world) state() hpa.State {
	return hpa.State{SpecReplicas: w.size, StatusReplicas: max(0, w.size+w.lag), Pods: w.pods, Readings: w.readings}
}

// play runs the controller through the scenario and gives what it did. It must run in a bubble of synctest.
func play(t *testing.T, s scenario) (w *world, problem error) {
	ctx, stop := context.WithCancel(klog.NewContext(context.Background(), klog.Logger(logr.Discard())))
	defer stop()
	w = &world{flags: s.flags, client: fake.NewSimpleClientset()}
	first := s.steps[0]
	w.spec, w.size, w.lag, w.pods, w.readings = *first.spec, *first.size, first.lag, first.pods, first.readings
	object := manifest(w.spec)
	if _, err := w.client.AutoscalingV2().HorizontalPodAutoscalers(namespace).Create(ctx, object, metav1.CreateOptions{}); err != nil {
		return w, err
	}
	if err := w.storePods(ctx); err != nil {
		return w, err
	}
	w.client.PrependReactor("create", "events", func(a clienttesting.Action) (bool, runtime.Object, error) {
		return true, a.(clienttesting.CreateAction).GetObject(), nil
	})

	factory := informers.NewSharedInformerFactory(w.client, period)
	apps := schema.GroupVersion{Group: "apps", Version: "v1"}
	mapper := meta.NewDefaultRESTMapper([]schema.GroupVersion{apps})
	mapper.Add(apps.WithKind("StatefulSet"), meta.RESTScopeNamespace)
	controller := podautoscaler.NewHorizontalController(ctx, w.client.CoreV1(), w.scales(), w.client.AutoscalingV2(), mapper, w.metrics(),
		factory.Autoscaling().V2().HorizontalPodAutoscalers(), factory.Core().V1().Pods(),
		period, w.flags.DownscaleStabilization, w.flags.Tolerance, w.flags.CPUInitialization, w.flags.InitialReadinessDelay)
	factory.Start(ctx.Done())
	done := make(chan struct{})
	go func() {
		defer close(done)
		controller.Run(ctx, 1)
	}()
	defer func() {
		stop()
		<-done
		factory.Shutdown()
	}()

	for _, st := range s.steps[1:] {
		time.Sleep(time.Until(st.at))
		synctest.Wait()
		if problem := w.compare(); problem != nil {
			return w, problem
		}
		if err := w.apply(ctx, st); err != nil {
			return w, err
		}
		synctest.Wait()
		if problem := w.compare(); problem != nil {
			return w, problem
		}
	}
	if least := int(time.Since(epoch) / period); len(w.looks) < least {
		return w, fmt.Errorf("the controller synced %d times in %s, which is less than every %s", len(w.looks), time.Since(epoch), period)
	}
	return w, nil
}

// apply changes the world. The spec comes last, for the controller syncs at once when that changes.
func (w *world) apply(ctx context.Context, st step) error {
	w.mu.Lock()
	w.lag, w.pods, w.readings = st.lag, st.pods, st.readings
	if st.spec != nil {
		w.spec = *st.spec
	}
	if st.size != nil {
		w.size = *st.size
	}
	w.mu.Unlock()
	if err := w.storePods(ctx); err != nil {
		return err
	}
	synctest.Wait()
	if st.spec == nil {
		return nil
	}
	hpas := w.client.AutoscalingV2().HorizontalPodAutoscalers(namespace)
	stored, err := hpas.Get(ctx, workload, metav1.GetOptions{})
	if err != nil {
		return err
	}
	stored.Spec = manifest(w.spec).Spec
	stored.Generation++
	_, err = hpas.Update(ctx, stored, metav1.UpdateOptions{})
	return err
}

// storePods replaces the pods in the API server by those of the world.
func (w *world) storePods(ctx context.Context) error {
	pods := w.client.CoreV1().Pods(namespace)
	stored, err := pods.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, p := range stored.Items {
		if err := pods.Delete(ctx, p.Name, metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	for _, p := range w.pods {
		if _, err := pods.Create(ctx, podObject(p, w.spec.Metrics, w.readings), metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// scales is the scale subresource. The controller reads it once in every sync, first of all: that is when the package decides, too.
func (w *world) scales() *scalefake.FakeScaleClient {
	scales := &scalefake.FakeScaleClient{}
	scales.AddReactor("get", "statefulsets", func(clienttesting.Action) (bool, runtime.Object, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		l := &look{at: time.Now(), spec: w.spec, state: w.state()}
		l.decision, w.history = hpa.Decide(w.flags, l.spec, l.state, w.history, l.at)
		w.looks = append(w.looks, l)
		return true, &autoscalingv1.Scale{
			ObjectMeta: metav1.ObjectMeta{Name: workload, Namespace: namespace},
			Spec:       autoscalingv1.ScaleSpec{Replicas: l.state.SpecReplicas},
			Status:     autoscalingv1.ScaleStatus{Replicas: l.state.StatusReplicas, Selector: "app=" + workload},
		}, nil
	})
	scales.AddReactor("update", "statefulsets", func(a clienttesting.Action) (bool, runtime.Object, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		scale := a.(clienttesting.UpdateAction).GetObject().(*autoscalingv1.Scale)
		w.size = scale.Spec.Replicas
		w.looks[len(w.looks)-1].wrote = &scale.Spec.Replicas
		return true, scale, nil
	})
	return scales
}

// metrics are the three metrics APIs.
func (w *world) metrics() metrics.MetricsClient {
	externals, customs, ofResources := &externalfake.FakeExternalMetricsClient{}, &customfake.FakeCustomMetricsClient{}, resourcesfake.NewSimpleClientset()
	externals.AddReactor("list", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		_, reading, err := w.find(a.GetResource().Resource)
		if err != nil {
			return true, nil, err
		}
		list := &external.ExternalMetricValueList{}
		for _, v := range reading.Items {
			list.Items = append(list.Items, external.ExternalMetricValue{Value: quantity(v)})
		}
		return true, list, nil
	})
	customs.AddReactor("get", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		metric, reading, err := w.find(a.(customfake.GetForAction).GetMetricName())
		if err != nil {
			return true, nil, err
		}
		list := &custom.MetricValueList{}
		if metric.Source == hpa.Object {
			if len(reading.Items) == 0 {
				return true, nil, errors.New("the object has no such metric")
			}
			list.Items = []custom.MetricValue{{Value: quantity(reading.Items[0])}}
		}
		for name, s := range reading.Samples {
			list.Items = append(list.Items, custom.MetricValue{DescribedObject: corev1.ObjectReference{Kind: "Pod", Name: name}, Value: quantity(s.Value)})
		}
		return true, list, nil
	})
	ofResources.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		metric, reading, err := w.find("cpu")
		if metric.Name == "" {
			metric, reading, err = w.find("memory")
		}
		if err != nil {
			return true, nil, err
		}
		list := &resources.PodMetricsList{}
		for name, s := range reading.Samples {
			list.Items = append(list.Items, resources.PodMetrics{
				ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace, Labels: map[string]string{"app": workload}}, Timestamp: metav1.NewTime(s.At), Window: metav1.Duration{Duration: s.Window},
				Containers: []resources.ContainerMetrics{{Name: container, Usage: corev1.ResourceList{corev1.ResourceName(metric.Name): quantity(s.Value)}}},
			})
		}
		return true, list, nil
	})
	return metrics.NewRESTMetricsClient(ofResources.MetricsV1beta1(), customs, externals)
}

func (w *world) find(name string) (hpa.Metric, hpa.Reading, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, m := range w.spec.Metrics {
		if m.Name == name {
			return m, w.readings[i], w.readings[i].Err
		}
	}
	return hpa.Metric{}, hpa.Reading{}, fmt.Errorf("nobody asks for %s", name)
}
