// Package apitest is as much of a kube-apiserver as an aggregated API server asks: the front proxy's CA, who a token is,
// and who may do what. Tests and benchmarks run the real server against it.
package apitest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Review is a question of authorization.
type Review struct {
	User                      string
	Verb, Namespace, Resource string
	Path                      string // of a request that is for no resource
}

// API runs until Close.
type API struct {
	Kubeconfig string          // a file
	Proxy      tls.Certificate // the front proxy's; with it, X-Remote-User is believed
	Mux        *http.ServeMux  // for more of an API server
	server     *httptest.Server
}

// Start starts one; it keeps its files in dir. A bearer token "token-NAME" is the user NAME.
func Start(dir string, allow func(Review) bool) (*API, error) {
	ca, caKey, err := certificate("front-proxy-ca", nil, nil)
	if err != nil {
		return nil, err
	}
	client, clientKey, err := certificate("front-proxy-client", ca, caKey)
	if err != nil {
		return nil, err
	}
	users, _, err := certificate("users-ca", nil, nil) // nobody comes with a certificate of their own
	if err != nil {
		return nil, err
	}
	config := object{
		"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": object{"name": "extension-apiserver-authentication", "namespace": "kube-system", "resourceVersion": "1", "uid": "1"},
		"data": object{
			"client-ca-file":                     pemOf(users.Raw),
			"requestheader-client-ca-file":       pemOf(ca.Raw),
			"requestheader-allowed-names":        `["front-proxy-client"]`,
			"requestheader-username-headers":     `["X-Remote-User"]`,
			"requestheader-group-headers":        `["X-Remote-Group"]`,
			"requestheader-extra-headers-prefix": `["X-Remote-Extra-"]`,
		},
	}

	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/namespaces/kube-system/configmaps/{name}", func(w http.ResponseWriter, r *http.Request) { reply(w, 200, config) })
	mux.HandleFunc("GET /api/v1/namespaces/kube-system/configmaps", func(w http.ResponseWriter, r *http.Request) {
		switch q := r.URL.Query(); {
		case q.Get("sendInitialEvents") != "":
			reply(w, 422, object{"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "Invalid", "code": 422})
		case q.Get("watch") != "":
			w.Header().Set("Content-Type", "application/json")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			reply(w, 200, object{"apiVersion": "v1", "kind": "ConfigMapList", "metadata": object{"resourceVersion": "1"}, "items": []object{config}})
		}
	})
	mux.HandleFunc("POST /apis/authentication.k8s.io/v1/tokenreviews", func(w http.ResponseWriter, r *http.Request) {
		var in struct{ Spec struct{ Token string } }
		if json.NewDecoder(r.Body).Decode(&in) != nil {
			w.WriteHeader(400)
			return
		}
		name, known := strings.CutPrefix(in.Spec.Token, "token-")
		status := object{"authenticated": known}
		if known {
			status["user"] = object{"username": name}
		}
		reply(w, 201, object{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "status": status})
	})
	mux.HandleFunc("POST /apis/authorization.k8s.io/v1/subjectaccessreviews", func(w http.ResponseWriter, r *http.Request) {
		var in struct {
			Spec struct {
				User                  string
				ResourceAttributes    struct{ Namespace, Verb, Resource string }
				NonResourceAttributes struct{ Path, Verb string }
			}
		}
		if json.NewDecoder(r.Body).Decode(&in) != nil {
			w.WriteHeader(400)
			return
		}
		a := in.Spec.ResourceAttributes
		allowed := allow(Review{User: in.Spec.User, Verb: a.Verb + in.Spec.NonResourceAttributes.Verb, Namespace: a.Namespace, Resource: a.Resource, Path: in.Spec.NonResourceAttributes.Path})
		reply(w, 201, object{"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "status": object{"allowed": allowed}})
	})
	server := httptest.NewTLSServer(mux)

	kubeconfig := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: u, user: {token: adapter}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, server.URL, base64.StdEncoding.EncodeToString([]byte(pemOf(server.Certificate().Raw))))
	path := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(path, []byte(kubeconfig), 0o600); err != nil {
		server.Close()
		return nil, err
	}
	return &API{Kubeconfig: path, Proxy: tls.Certificate{Certificate: [][]byte{client.Raw}, PrivateKey: clientKey}, Mux: mux, server: server}, nil
}

// Close stops it.
func (a *API) Close() {
	a.server.CloseClientConnections()
	a.server.Close()
}

type object = map[string]any

func reply(w http.ResponseWriter, code int, body object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(body)
}

func pemOf(der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func certificate(name string, ca *x509.Certificate, caKey crypto.Signer) (*x509.Certificate, crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		IsCA: ca == nil, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if ca == nil {
		ca, caKey = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca, key.Public(), caKey)
	if err != nil {
		return nil, nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return cert, key, err
}
