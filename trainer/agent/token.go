package agent

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// TokenConfig is what a [Token] needs. All fields are to be given.
type TokenConfig struct {
	File        string // a projected ServiceAccount token, which the kubelet renews
	Audience    string // that it was made for: see [Audience]
	Namespace   string
	StatefulSet string
	// Keys returns the cluster's public keys, as a JSON Web Key Set. It is called when there is a token of an unknown key.
	Keys func(ctx context.Context) ([]byte, error)
}

// Audience is the audience of a job's tokens: a token that a pod has for anything else, such as the API server, opens no ring.
func Audience(namespace, statefulSet string) string {
	return "capstan.dev/" + namespace + "/" + statefulSet
}

// Token is an [Authenticator] of pods: the kubelet has given each a token that names it, signed by the API server. Checking it needs the
// cluster's keys, which every pod may read, and no call of the API server.
type Token struct {
	cfg TokenConfig

	mu    sync.Mutex
	keys  map[string]crypto.PublicKey
	asked time.Time // when Keys was called last
}

// NewToken returns an authenticator; it reads nothing yet.
func NewToken(cfg TokenConfig) *Token { return &Token{cfg: cfg} }

// askAgain bounds how often strangers' tokens have the keys read.
const askAgain = 10 * time.Second

// podClaims are the claims of a token that is bound to a pod.
type podClaims struct {
	jwt.RegisteredClaims
	Kubernetes struct {
		Namespace string `json:"namespace"`
		Pod       struct {
			Name string `json:"name"`
			UID  string `json:"uid"`
		} `json:"pod"`
	} `json:"kubernetes.io"`
}

// Prove returns the newest token.
func (t *Token) Prove(Claim) (string, error) {
	data, err := os.ReadFile(t.cfg.File)
	if err != nil {
		return "", fmt.Errorf("read the token: %w; mount a projected serviceAccountToken with the audience %s there", err, t.cfg.Audience)
	}
	return strings.TrimSpace(string(data)), nil
}

// Bearer says yes.
func (t *Token) Bearer() bool { return true }

// Verify checks that the cluster made the token, for this job, for the pod of that ordinal and UID.
func (t *Token) Verify(ctx context.Context, c Claim, proof string) error {
	issuer, err := t.issuer()
	if err != nil {
		return err
	}
	var claims podClaims
	parser := jwt.NewParser(
		jwt.WithValidMethods([]string{"RS256", "RS384", "RS512", "ES256", "ES384", "ES512"}),
		jwt.WithAudience(t.cfg.Audience), jwt.WithIssuer(issuer), jwt.WithExpirationRequired(), jwt.WithLeeway(30*time.Second))
	_, err = parser.ParseWithClaims(proof, &claims, func(token *jwt.Token) (any, error) {
		id, _ := token.Header["kid"].(string)
		return t.key(ctx, id)
	})
	if err != nil {
		return fmt.Errorf("token: %w", err)
	}
	k := claims.Kubernetes
	if want := fmt.Sprintf("%s-%d", t.cfg.StatefulSet, c.ID.Ordinal); k.Namespace != t.cfg.Namespace || k.Pod.Name != want || k.Pod.UID != c.ID.Pod {
		return fmt.Errorf("token of pod %.100s/%.100s, UID %.60q: want %s/%s, %q", k.Namespace, k.Pod.Name, k.Pod.UID, t.cfg.Namespace, want, c.ID.Pod)
	}
	return nil
}

// issuer is who made our own token, which we got from the kubelet.
func (t *Token) issuer() (string, error) {
	own, err := t.Prove(Claim{})
	if err != nil {
		return "", err
	}
	var claims podClaims
	if _, _, err := jwt.NewParser().ParseUnverified(own, &claims); err != nil || claims.Issuer == "" {
		return "", fmt.Errorf("token in %s: no token of a cluster: %w", t.cfg.File, err)
	}
	return claims.Issuer, nil
}

// key is the cluster's key of that name.
func (t *Token) key(ctx context.Context, id string) (crypto.PublicKey, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k := t.keys[id]; k != nil {
		return k, nil
	}
	if !t.asked.IsZero() && time.Since(t.asked) < askAgain {
		return nil, fmt.Errorf("key %.60q is none of the cluster's", id)
	}
	data, err := t.cfg.Keys(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the cluster's keys: %w", err) // and try again with the next one
	}
	keys, err := parseKeys(data)
	if err != nil {
		return nil, fmt.Errorf("read the cluster's keys: %w", err)
	}
	t.keys, t.asked = keys, time.Now()
	if k := t.keys[id]; k != nil {
		return k, nil
	}
	return nil, fmt.Errorf("key %.60q is none of the cluster's", id)
}

// parseKeys reads a JSON Web Key Set (RFC 7517, RFC 7518 section 6). Keys of kinds that no API server signs with are left out.
func parseKeys(data []byte) (map[string]crypto.PublicKey, error) {
	var set struct {
		Keys []struct {
			ID       string `json:"kid"`
			Kind     string `json:"kty"`
			Use      string `json:"use"`
			Modulus  number `json:"n"`
			Exponent number `json:"e"`
			Curve    string `json:"crv"`
			X, Y     number
		} `json:"keys"`
	}
	if err := json.Unmarshal(data, &set); err != nil {
		return nil, err
	}
	keys := map[string]crypto.PublicKey{}
	for _, k := range set.Keys {
		if k.Use != "" && k.Use != "sig" {
			continue
		}
		switch k.Kind {
		case "RSA":
			e := new(big.Int).SetBytes(k.Exponent)
			if len(k.Modulus) < 2048/8 || !e.IsInt64() || e.Int64() < 3 || e.Int64() > 1<<31-1 {
				return nil, fmt.Errorf("key %.60q: no RSA key of 2048 bits or more", k.ID)
			}
			keys[k.ID] = &rsa.PublicKey{N: new(big.Int).SetBytes(k.Modulus), E: int(e.Int64())}
		case "EC":
			curve := map[string]elliptic.Curve{"P-256": elliptic.P256(), "P-384": elliptic.P384(), "P-521": elliptic.P521()}[k.Curve]
			if curve == nil {
				continue
			}
			size := (curve.Params().BitSize + 7) / 8
			if len(k.X) != size || len(k.Y) != size {
				return nil, fmt.Errorf("key %.60q: its point has %d and %d bytes, want %d", k.ID, len(k.X), len(k.Y), size)
			}
			public, err := ecdsa.ParseUncompressedPublicKey(curve, append(append([]byte{4}, k.X...), k.Y...))
			if err != nil {
				return nil, fmt.Errorf("key %.60q: %w", k.ID, err)
			}
			keys[k.ID] = public
		}
	}
	if len(keys) == 0 {
		return nil, errors.New("there is none")
	}
	return keys, nil
}

// number is base64url without padding.
type number []byte

func (n *number) UnmarshalText(text []byte) (err error) {
	*n, err = base64.RawURLEncoding.AppendDecode(nil, text)
	return err
}
