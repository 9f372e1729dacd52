package collect

import (
	"cmp"
	"context"
	"net"
	"net/url"
	"slices"
	"strconv"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	discoveryinformers "k8s.io/client-go/informers/discovery/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// Discovery knows where the exporters are, from the EndpointSlices of their Service.
type Discovery struct {
	informer cache.SharedIndexInformer
}

// NewDiscovery makes one and starts nothing.
func NewDiscovery(client kubernetes.Interface, namespace, service string) *Discovery {
	informer := discoveryinformers.NewFilteredEndpointSliceInformer(client, namespace, 0, cache.Indexers{}, func(o *metav1.ListOptions) {
		o.LabelSelector = discoveryv1.LabelServiceName + "=" + service
	})
	return &Discovery{informer}
}

// Run watches until ctx is done.
func (d *Discovery) Run(ctx context.Context) { d.informer.RunWithContext(ctx) }

// Synced says whether the first list has arrived.
func (d *Discovery) Synced() bool { return d.informer.HasSynced() }

// Targets are the exporters there are now.
func (d *Discovery) Targets() []Target {
	objects := d.informer.GetStore().List()
	list := make([]*discoveryv1.EndpointSlice, 0, len(objects))
	for _, o := range objects {
		list = append(list, o.(*discoveryv1.EndpointSlice))
	}
	return TargetsOf(list)
}

// TargetsOf reads the exporters off EndpointSlices, sorted by node. They are asked by TLS where the Service says so (appProtocol: https). An endpoint that is not ready is a target, too: a
// page says by itself whether it is worth something, and an exporter that finds no driver is not ready for long. One
// pod is one target, whatever number of addresses it has. Endpoints without a node are left out.
func TargetsOf(list []*discoveryv1.EndpointSlice) []Target {
	byID := map[string]Target{}
	for _, s := range list {
		if s.AddressType == discoveryv1.AddressTypeFQDN || len(s.Ports) == 0 {
			continue
		}
		port := s.Ports[0]
		for _, p := range s.Ports {
			if p.Name != nil && *p.Name == "metrics" {
				port = p
			}
		}
		if port.Port == nil {
			continue
		}
		scheme := "http"
		if port.AppProtocol != nil && *port.AppProtocol == "https" {
			scheme = "https"
		}
		for _, e := range s.Endpoints {
			if e.NodeName == nil || *e.NodeName == "" || len(e.Addresses) == 0 {
				continue
			}
			u := url.URL{Scheme: scheme, Host: net.JoinHostPort(e.Addresses[0], strconv.Itoa(int(*port.Port))), Path: "/metrics"}
			t := Target{ID: e.Addresses[0], Node: *e.NodeName, URL: u.String()}
			if e.TargetRef != nil && e.TargetRef.UID != "" {
				t.ID = string(e.TargetRef.UID)
			}
			if had, ok := byID[t.ID]; !ok || t.URL < had.URL {
				byID[t.ID] = t
			}
		}
	}
	out := make([]Target, 0, len(byID))
	for _, t := range byID {
		out = append(out, t)
	}
	slices.SortFunc(out, func(a, b Target) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.ID, b.ID)) })
	return out
}
