package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

// startControlPlane starts etcd, the API server, the controller manager and the scheduler in node-1's network namespace.
func (c *Cluster) startControlPlane(ctx context.Context) error {
	hub := newNode(1)
	pki := func(name string) string { return c.path("pki", name) }
	audit := c.path("audit-policy.yaml")
	if err := os.WriteFile(audit, []byte("apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n"), 0o644); err != nil {
		return err
	}
	const etcd = "http://127.0.0.1:2379"
	// The data is not worth an fsync: it ends with the cluster.
	if err := c.start("etcd", nil, hub.inNet(c.bin("etcd"), "--data-dir", c.path("etcd"), "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
		"--listen-peer-urls", "http://127.0.0.1:2380", "--initial-advertise-peer-urls", "http://127.0.0.1:2380", "--initial-cluster", "default=http://127.0.0.1:2380",
		"--unsafe-no-fsync")...); err != nil {
		return err
	}
	if err := c.start("apiserver", nil, hub.inNet(c.bin("kube-apiserver"),
		"--etcd-servers="+etcd, "--advertise-address="+hub.IP, "--secure-port=6443",
		"--tls-cert-file="+pki("apiserver.crt"), "--tls-private-key-file="+pki("apiserver.key"), "--client-ca-file="+pki("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+pki("sa.pub"), "--service-account-signing-key-file="+pki("sa.key"),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--service-cluster-ip-range="+serviceRange, "--allow-privileged=true",
		"--requestheader-client-ca-file="+pki("front-proxy-ca.crt"), "--requestheader-allowed-names=front-proxy-client",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-", "--requestheader-group-headers=X-Remote-Group", "--requestheader-username-headers=X-Remote-User",
		"--proxy-client-cert-file="+pki("front-proxy-client.crt"), "--proxy-client-key-file="+pki("front-proxy-client.key"), "--enable-aggregator-routing=true",
		"--kubelet-client-certificate="+pki("apiserver-kubelet.crt"), "--kubelet-client-key="+pki("apiserver-kubelet.key"), "--kubelet-preferred-address-types=InternalIP",
		"--audit-policy-file="+audit, "--audit-log-path="+c.path("log", "audit.log"), "--audit-log-maxsize=200", "--audit-log-maxbackup=1")...); err != nil {
		return err
	}
	if err := c.waitForAPI(ctx); err != nil {
		return err
	}
	// These two exit when the API server's own roles are not there yet: they come after it is ready.
	if err := c.start("controller-manager", nil, hub.inNet(c.bin("kube-controller-manager"),
		"--kubeconfig="+c.kubeconfig("kcm"), "--authentication-kubeconfig="+c.kubeconfig("kcm"), "--authorization-kubeconfig="+c.kubeconfig("kcm"),
		"--service-account-private-key-file="+pki("sa.key"), "--root-ca-file="+pki("ca.crt"), "--use-service-account-credentials=true", "--leader-elect=false",
		"--allocate-node-cidrs=false", "--node-monitor-grace-period=6s", "--node-monitor-period=1s",
		"--horizontal-pod-autoscaler-sync-period="+c.Config.HPASync, "--horizontal-pod-autoscaler-downscale-stabilization="+c.Config.HPADown)...); err != nil {
		return err
	}
	return c.start("scheduler", nil, hub.inNet(c.bin("kube-scheduler"),
		"--kubeconfig="+c.kubeconfig("scheduler"), "--authentication-kubeconfig="+c.kubeconfig("scheduler"), "--authorization-kubeconfig="+c.kubeconfig("scheduler"), "--leader-elect=false")...)
}

// client speaks to the API server as its administrator, through the door.
func (c *Cluster) client() (*http.Client, error) {
	pair, err := tls.LoadX509KeyPair(c.path("pki", "admin.crt"), c.path("pki", "admin.key"))
	if err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(c.path("pki", "ca.crt"))
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	return &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: pool}, Proxy: nil}}, nil
}

func (c *Cluster) waitForAPI(ctx context.Context) error {
	client, err := c.client()
	if err != nil {
		return err
	}
	last := ""
	return c.wait(ctx, time.Minute, "apiserver", func() (bool, string) {
		response, err := client.Get(fmt.Sprintf("https://127.0.0.1:%d/readyz", c.DoorPort))
		if err != nil {
			return false, err.Error()
		}
		response.Body.Close()
		last = response.Status
		return response.StatusCode == http.StatusOK, last
	})
}

// wait calls check until it is true; when it is not in time, or the program that it waits for has ended, the error shows the end of
// that program's log.
func (c *Cluster) wait(ctx context.Context, limit time.Duration, program string, check func() (bool, string)) error {
	deadline := time.Now().Add(limit)
	for {
		ok, state := check()
		if ok {
			return nil
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case !c.process(program).alive() && time.Until(deadline) < limit-2*time.Second:
			return c.failure(program, "has ended")
		case time.Now().After(deadline):
			return c.failure(program, fmt.Sprintf("is not ready after %s (%s)", limit, state))
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// failure is an error with the end of a program's log and the folder of all logs.
func (c *Cluster) failure(program, what string) error {
	data, err := os.ReadFile(c.path("log", program+".log"))
	if err != nil {
		data = []byte(err.Error())
	}
	if len(data) > 2000 {
		data = data[len(data)-2000:]
	}
	return fmt.Errorf("%s %s; all logs are in %s; the end of %s.log:\n%s", program, what, c.path("log"), program, data)
}

// openDoor starts the process that lets ordinary programs in. Its listener is made here, on loopback, and inherited: a socket
// belongs to the network namespace in which it was made, so the process in node-1's namespace accepts what comes to the machine's.
func (c *Cluster) openDoor() error {
	if c.process("door").alive() {
		return nil
	}
	listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", c.DoorPort))
	if err != nil {
		return fmt.Errorf("open the cluster's door on loopback: %w", err)
	}
	defer listener.Close()
	file, err := listener.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	defer file.Close()
	hub := newNode(1)
	return c.start("door", []*os.File{file}, hub.inNet(c.path("bin", "cluster"), "door", hub.IP+":6443")...)
}
