package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"time"

	"sigs.k8s.io/yaml"
)

// authority signs the cluster's certificates.
type authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

const lifetime = 365 * 24 * time.Hour

// writeKeys makes every key and certificate of the cluster, and a kubeconfig for each part, unless they are there.
func (c *Cluster) writeKeys() error {
	if _, err := os.Stat(c.path("pki", "done")); err == nil {
		return nil
	}
	ca, err := c.newAuthority("ca")
	if err != nil {
		return err
	}
	proxy, err := c.newAuthority("front-proxy-ca")
	if err != nil {
		return err
	}
	inside := "https://" + newNode(1).IP + ":6443"
	type subject struct {
		file, name string
		groups     []string
		by         *authority
		hosts      []string
		kubeconfig string // the server's address in it; "" = none
	}
	subjects := []subject{
		{file: "apiserver", name: "kube-apiserver", by: ca, hosts: []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost", "127.0.0.1", serviceIP(1), newNode(1).IP}},
		{file: "apiserver-kubelet", name: "apiserver-kubelet", groups: []string{"system:masters"}, by: ca},
		{file: "front-proxy-client", name: "front-proxy-client", by: proxy},
		{file: "admin", name: "admin", groups: []string{"system:masters"}, by: ca, kubeconfig: fmt.Sprintf("https://127.0.0.1:%d", c.DoorPort)},
		{file: "kcm", name: "system:kube-controller-manager", by: ca, kubeconfig: inside},
		{file: "scheduler", name: "system:kube-scheduler", by: ca, kubeconfig: inside},
		{file: "kproxy", name: "system:kube-proxy", by: ca, kubeconfig: inside},
	}
	for i := range c.Config.Nodes {
		n := newNode(i + 1)
		subjects = append(subjects, subject{file: n.Name, name: "system:node:" + n.Name, groups: []string{"system:nodes"}, by: ca, hosts: []string{n.Name, n.IP}, kubeconfig: inside})
	}
	for i, s := range subjects {
		if err := c.sign(s.by, int64(i+2), s.file, s.name, s.groups, s.hosts); err != nil {
			return fmt.Errorf("sign %s: %w", s.file, err)
		}
		if s.kubeconfig != "" {
			if err := c.writeKubeconfig(s.file, s.kubeconfig); err != nil {
				return err
			}
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	if err := c.writeKey("sa", key); err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	if err := os.WriteFile(c.path("pki", "sa.pub"), pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}), 0o644); err != nil {
		return err
	}
	return os.WriteFile(c.path("pki", "done"), nil, 0o600)
}

func (c *Cluster) newAuthority(name string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(lifetime),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	if err := c.writeKey(name, key); err != nil {
		return nil, err
	}
	return &authority{cert, key}, c.writeCertificate(name, der)
}

func (c *Cluster) sign(by *authority, serial int64, file, name string, groups, hosts []string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name, Organization: groups}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(lifetime),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, h)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by.cert, key.Public(), by.key)
	if err != nil {
		return err
	}
	if err := c.writeKey(file, key); err != nil {
		return err
	}
	return c.writeCertificate(file, der)
}

func (c *Cluster) writeKey(name string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	return os.WriteFile(c.path("pki", name+".key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600)
}

func (c *Cluster) writeCertificate(name string, der []byte) error {
	return os.WriteFile(c.path("pki", name+".crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644)
}

func (c *Cluster) writeKubeconfig(user, server string) error {
	read := func(name string) ([]byte, error) { return os.ReadFile(c.path("pki", name)) }
	ca, err := read("ca.crt")
	if err != nil {
		return err
	}
	cert, err := read(user + ".crt")
	if err != nil {
		return err
	}
	key, err := read(user + ".key")
	if err != nil {
		return err
	}
	type o = map[string]any
	data, err := yaml.Marshal(o{
		"apiVersion": "v1", "kind": "Config", "current-context": "capstan",
		"clusters": []o{{"name": "capstan", "cluster": o{"server": server, "certificate-authority-data": ca}}},
		"users":    []o{{"name": user, "user": o{"client-certificate-data": cert, "client-key-data": key}}},
		"contexts": []o{{"name": "capstan", "context": o{"cluster": "capstan", "user": user}}},
	})
	if err != nil {
		return err
	}
	return os.WriteFile(c.kubeconfig(user), data, 0o600)
}
