package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/capstan-gpu/capstan/adapter/api/apitest"
)

type object = map[string]any

// cluster is a kube-apiserver's answers to what the adapter asks, objects as large as real ones.
type cluster struct {
	*apitest.API
	mu         sync.Mutex                // protects the following fields
	secrets    map[string]*corev1.Secret // by name
	serving    *tls.Config               // of the exporters, once they have been asked
	apiService object
}

func startCluster(dir string, e *exporters) (*cluster, error) {
	api, err := apitest.Start(dir, func(r apitest.Review) bool { return true })
	if err != nil {
		return nil, err
	}
	c := &cluster{API: api, secrets: map[string]*corev1.Secret{}, apiService: object{
		"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": object{"name": "v1beta1.external.metrics.k8s.io", "resourceVersion": "1"},
		"spec": object{"group": "external.metrics.k8s.io", "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
			"service": object{"namespace": "capstan-system", "name": "capstan-adapter", "port": 443}},
	}}
	ready := time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)
	var pods, statefulSets, hpas []object
	for i := range nodes {
		for j := range podsPerNode {
			pods = append(pods, podObject(podOf(i, j), ready))
		}
	}
	for i := range sets {
		statefulSets = append(statefulSets, object{
			"metadata": object{"namespace": namespaceOf(i), "name": setName(i), "uid": setName(i), "resourceVersion": "1"},
			"spec":     object{"serviceName": setName(i), "template": object{"spec": podSpec("")}},
		})
		hpas = append(hpas, object{
			"metadata": object{"namespace": namespaceOf(i), "name": setName(i), "uid": setName(i) + "-hpa", "resourceVersion": "1"},
			"spec": object{"scaleTargetRef": object{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": setName(i)}, "maxReplicas": 20,
				"metrics": []object{{"type": "External", "external": object{"metric": object{"name": "gpu_utilization", "selector": object{"matchLabels": object{"workload": setName(i)}}},
					"target": object{"type": "AverageValue", "averageValue": "80"}}}}},
		})
	}
	var slices []object
	for i := 0; i < nodes; i += 100 {
		var endpoints []object
		for n := i; n < i+100; n++ {
			endpoints = append(endpoints, object{"addresses": []string{address(n)}, "nodeName": nodeName(n), "targetRef": object{"kind": "Pod", "uid": fmt.Sprint("exporter-", n)}})
		}
		slices = append(slices, object{"metadata": object{"namespace": "capstan-node", "name": fmt.Sprint("s", i), "uid": fmt.Sprint("s", i), "resourceVersion": "1"},
			"addressType": "IPv4", "endpoints": endpoints, "ports": []object{{"name": "metrics", "port": e.port, "appProtocol": "https"}}})
	}
	for _, l := range []struct {
		path, version, kind string
		items               []object
	}{
		{"/api/v1/pods", "v1", "Pod", pods},
		{"/apis/apps/v1/statefulsets", "apps/v1", "StatefulSet", statefulSets},
		{"/apis/autoscaling/v2/horizontalpodautoscalers", "autoscaling/v2", "HorizontalPodAutoscaler", hpas},
		{"/apis/discovery.k8s.io/v1/namespaces/capstan-node/endpointslices", "discovery.k8s.io/v1", "EndpointSlice", slices},
	} {
		if err := c.list(l.path, l.version, l.kind, l.items); err != nil {
			return nil, err
		}
	}
	for _, namespace := range []string{"capstan-system", "capstan-node"} {
		c.Mux.HandleFunc("/api/v1/namespaces/"+namespace+"/secrets/", c.serveSecret)
		c.Mux.HandleFunc("/api/v1/namespaces/"+namespace+"/secrets", c.serveSecret)
	}
	c.Mux.HandleFunc("/apis/apiregistration.k8s.io/v1/apiservices/", c.serveAPIService)
	return c, nil
}

// list serves a resource that never changes, by list and by watch, also by one that begins with what there is.
func (c *cluster) list(path, version, kind string, items []object) error {
	var encoded [][]byte
	for _, it := range items {
		it["apiVersion"], it["kind"] = version, kind
		b, err := json.Marshal(it)
		if err != nil {
			return err
		}
		encoded = append(encoded, b)
	}
	c.Mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		q := r.URL.Query()
		if q.Get("watch") == "" {
			fmt.Fprintf(w, `{"apiVersion":%q,"kind":%q,"metadata":{"resourceVersion":"1"},"items":[`, version, kind+"List")
			for i, b := range encoded {
				if i > 0 {
					io.WriteString(w, ",")
				}
				w.Write(b)
			}
			io.WriteString(w, "]}")
			return
		}
		if q.Get("sendInitialEvents") == "true" {
			for _, b := range encoded {
				fmt.Fprintf(w, `{"type":"ADDED","object":%s}`+"\n", b)
			}
			fmt.Fprintf(w, `{"type":"BOOKMARK","object":{"apiVersion":%q,"kind":%q,"metadata":{"resourceVersion":"1","annotations":{"k8s.io/initial-events-end":"true"}}}}`+"\n", version, kind)
		}
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	return nil
}

func (c *cluster) serveSecret(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	if r.Method != http.MethodGet {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		o, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
		if err != nil {
			http.Error(w, err.Error(), 400)
			return
		}
		secret := o.(*corev1.Secret)
		secret.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"}
		c.secrets[secret.Name] = secret
		json.NewEncoder(w).Encode(secret)
		return
	}
	secret := c.secrets[path.Base(r.URL.Path)]
	if secret == nil {
		w.WriteHeader(404)
		io.WriteString(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"NotFound","code":404}`)
		return
	}
	json.NewEncoder(w).Encode(secret)
}

// exporterTLS is what an exporter serves with: the Secret that the adapter gave it.
func (c *cluster) exporterTLS(*tls.ClientHelloInfo) (*tls.Config, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	secret := c.secrets["capstan-exporter-tls"]
	if secret == nil {
		return nil, errors.New("the adapter has made no certificate for exporters yet")
	}
	if c.serving == nil {
		pair, err := tls.X509KeyPair(secret.Data["tls.crt"], secret.Data["tls.key"])
		if err != nil {
			return nil, err
		}
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(secret.Data["ca.crt"])
		c.serving = &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13}
	}
	return c.serving, nil
}

func (c *cluster) serveAPIService(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.Method == http.MethodPatch {
		var patch struct{ Spec object }
		if err := json.NewDecoder(r.Body).Decode(&patch); err != nil {
			http.Error(w, err.Error(), 400)
			return
		}
		for k, v := range patch.Spec {
			c.apiService["spec"].(object)[k] = v
		}
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(c.apiService)
}

// caBundle is what the adapter has filled in, in PEM.
func (c *cluster) caBundle() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	encoded, _ := c.apiService["spec"].(object)["caBundle"].(string)
	pem, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return nil
	}
	return pem
}

func podSpec(node string) object {
	return object{
		"nodeName": node, "serviceAccountName": "default", "restartPolicy": "Always", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst",
		"containers": []object{{
			"name": "worker", "image": "registry.example.internal/team/training@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
			"command":      []string{"python", "/opt/model/train.py", "--batch-size=256", "--learning-rate=0.001"},
			"env":          []object{{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}, {"name": "DATA", "value": "/data/imagenet"}},
			"resources":    object{"requests": object{"nvidia.com/gpu": "1", "cpu": "8", "memory": "64Gi"}, "limits": object{"nvidia.com/gpu": "1", "cpu": "8", "memory": "64Gi"}},
			"volumeMounts": []object{{"name": "data", "mountPath": "/data"}, {"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}},
		}},
		"volumes":     []object{{"name": "data", "persistentVolumeClaim": object{"claimName": "data"}}, {"name": "token", "projected": object{"sources": []object{{"serviceAccountToken": object{"path": "token"}}}}}},
		"tolerations": []object{{"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 300}},
	}
}

func podObject(p pod, ready string) object {
	condition := func(kind string) object {
		return object{"type": kind, "status": "True", "lastTransitionTime": ready, "lastProbeTime": nil}
	}
	return object{
		"metadata": object{
			"namespace": p.namespace, "name": p.name, "uid": p.uid, "resourceVersion": "1", "creationTimestamp": ready, "generateName": p.set + "-",
			"labels":          object{"app": p.set, "statefulset.kubernetes.io/pod-name": p.name, "apps.kubernetes.io/pod-index": "0", "controller-revision-hash": p.set + "-5d4f8c7b6d"},
			"annotations":     object{"capstan.dev/stats-port": "9402", "cni.example.com/config": `{"interface":"eth0","mac":"02:42:ac:11:00:02"}`},
			"ownerReferences": []object{{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": p.set, "uid": p.set, "controller": true, "blockOwnerDeletion": true}},
			"managedFields":   []object{{"manager": "kube-controller-manager", "operation": "Update", "apiVersion": "v1", "time": ready, "fieldsType": "FieldsV1", "fieldsV1": object{"f:metadata": object{"f:generateName": object{}, "f:labels": object{".": object{}, "f:app": object{}}}}}},
		},
		"spec":   podSpec(p.node),
		"status": object{"phase": "Running", "hostIP": "10.0.0.1", "podIP": "10.1.0.1", "startTime": ready, "conditions": []object{condition("Initialized"), condition("Ready"), condition("ContainersReady"), condition("PodScheduled")}, "containerStatuses": []object{{"name": "worker", "ready": true, "restartCount": 0, "image": "x", "imageID": "y", "state": object{"running": object{"startedAt": ready}}}}},
	}
}
