package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/capstan-gpu/capstan/images/image"
)

// The images that every node needs before any other; they exist nowhere but here.
const (
	pauseImage   = "localhost/capstan-cluster/pause:1"
	coreDNSImage = "localhost/capstan-cluster/coredns:1"
)

func (c *Cluster) writeImages() error {
	for _, i := range []struct{ ref, program, file string }{{pauseImage, "pause", "pause.tar"}, {coreDNSImage, "coredns", "coredns.tar"}} {
		built, err := image.Assemble([]image.File{{Path: "/" + i.program, Source: c.bin(i.program), Mode: 0o755}}, image.Config{Entrypoint: []string{"/" + i.program}})
		if err != nil {
			return fmt.Errorf("assemble %s: %w", i.ref, err)
		}
		if err := image.WriteTar(c.path("images", i.file), i.ref, built); err != nil {
			return err
		}
	}
	return nil
}

// loadOwnImages gives every node what it needs to run anything; every node must be on.
func (c *Cluster) loadOwnImages(ctx context.Context) error {
	for i := range c.Config.Nodes {
		if n := newNode(i + 1); !c.process(n.Name).alive() {
			return c.failure(n.Name, "has ended")
		}
	}
	return c.load(ctx, []string{c.path("images", "pause.tar"), c.path("images", "coredns.tar")}, io.Discard)
}

// load imports image archives into every running node. An archive that a node has already is skipped.
func (c *Cluster) load(ctx context.Context, files []string, w io.Writer) error {
	digests := map[string]string{}
	for _, file := range files {
		digest, err := digestOf(file)
		if err != nil {
			return err
		}
		digests[file] = digest
	}
	var (
		wait sync.WaitGroup
		mu   sync.Mutex
		errs []error
	)
	for i := range c.Config.Nodes {
		n := newNode(i + 1)
		if !c.process(n.Name).alive() {
			fmt.Fprintf(w, "%s is off: it gets no images\n", n.Name)
			continue
		}
		wait.Add(1)
		go func() {
			defer wait.Done()
			for _, file := range files {
				loaded, err := c.loadInto(ctx, n, file, digests[file])
				mu.Lock()
				if err != nil {
					errs = append(errs, err)
				} else if loaded {
					fmt.Fprintf(w, "loaded %s into %s\n", filepath.Base(file), n.Name)
				}
				mu.Unlock()
			}
		}()
	}
	wait.Wait()
	return errors.Join(errs...)
}

func (c *Cluster) loadInto(ctx context.Context, n node, file, digest string) (loaded bool, err error) {
	mark := c.path(n.Name, "loaded", digest)
	if _, err := os.Stat(mark); err == nil {
		return false, nil
	}
	absolute, err := filepath.Abs(file)
	if err != nil {
		return false, err
	}
	in, err := os.Open(absolute)
	if err != nil {
		return false, err
	}
	defer in.Close()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		var args []string
		if args, err = c.inNode(n, "ctr", "--address", "/run/containerd/containerd.sock", "-n", "k8s.io", "images", "import", "-"); err != nil {
			return false, err
		}
		if _, err = in.Seek(0, io.SeekStart); err != nil {
			return false, err
		}
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		cmd.Stdin = in
		out, failed := cmd.CombinedOutput()
		if failed == nil {
			break
		}
		err = fmt.Errorf("load %s into %s: %w: %s", file, n.Name, failed, out)
		if time.Now().After(deadline) || ctx.Err() != nil {
			return false, err
		}
	}
	if err := os.MkdirAll(filepath.Dir(mark), 0o755); err != nil {
		return false, err
	}
	return true, os.WriteFile(mark, nil, 0o644)
}

func digestOf(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// applyDNS gives the cluster its name service. CoreDNS does not cache cluster.local: a worker asks for its own name before it is
// published, and a cached "no such name" would keep it waiting for half a minute.
func (c *Cluster) applyDNS(ctx context.Context) error {
	_, err := c.kubectl(ctx, fmt.Sprintf(dnsManifest, coreDNSImage, serviceIP(10)), "apply", "--server-side", "-f", "-")
	return err
}

const dnsManifest = `apiVersion: v1
kind: ServiceAccount
metadata: {name: coredns, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: "system:coredns"}
rules:
- {apiGroups: [""], resources: [services, pods, namespaces], verbs: [list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: "system:coredns"}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:coredns"}
subjects: [{kind: ServiceAccount, name: coredns, namespace: kube-system}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: coredns, namespace: kube-system}
data:
  Corefile: |
    .:53 {
        errors
        health
        ready
        kubernetes cluster.local in-addr.arpa ip6.arpa {
            pods insecure
            fallthrough in-addr.arpa ip6.arpa
            ttl 5
        }
        cache 30 {
           disable success cluster.local
           disable denial cluster.local
        }
        loadbalance
    }
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: coredns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec:
  replicas: 1
  selector: {matchLabels: {k8s-app: kube-dns}}
  template:
    metadata: {labels: {k8s-app: kube-dns}}
    spec:
      serviceAccountName: coredns
      dnsPolicy: Default
      priorityClassName: system-cluster-critical
      nodeSelector: {kubernetes.io/hostname: node-1}
      containers:
      - name: coredns
        image: %s
        imagePullPolicy: Never
        args: [-conf, /etc/coredns/Corefile]
        securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {add: [NET_BIND_SERVICE], drop: [ALL]}}
        readinessProbe: {httpGet: {path: /ready, port: 8181}, periodSeconds: 1}
        livenessProbe: {httpGet: {path: /health, port: 8080}}
        volumeMounts: [{name: config, mountPath: /etc/coredns, readOnly: true}]
      volumes: [{name: config, configMap: {name: coredns}}]
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec:
  clusterIP: %s
  selector: {k8s-app: kube-dns}
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
`
