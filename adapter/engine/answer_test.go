package engine

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// raw is a server that answers every request with these bytes and closes the connection.
func raw(t *testing.T, response []byte) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			t.Error(err)
		}
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		if _, err := conn.Write(response); err != nil {
			t.Log(err)
		}
	}))
	t.Cleanup(server.Close)
	return server
}

// The files hold what a server sends and, below the line, what is made of it.
func TestAnswers(t *testing.T) {
	files, err := filepath.Glob("testdata/remote/*.txt")
	if err != nil || len(files) < 40 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			sent, want, ok := strings.Cut(string(data), "\n---\n")
			if !ok {
				t.Fatal("there is no line ---")
			}
			response := sent
			if strings.HasPrefix(response, "#") {
				_, response, _ = strings.Cut(response, "\n")
			}
			head, body, _ := strings.Cut(response, "\n\n")
			server := raw(t, []byte(strings.ReplaceAll(head, "\n", "\r\n")+"\r\n\r\n"+body))
			var out strings.Builder
			r := remote(t, RemoteConfig{URLs: []string{server.URL}, Annotated: func(_ string, notes []string) {
				for _, n := range notes {
					fmt.Fprintln(&out, "note:", n)
				}
			}})
			points, err := r.Func(15*time.Second)(t.Context(), "q", noon)
			for _, p := range points {
				fmt.Fprintln(&out, p.Labels, p.Value)
			}
			if n := testutil.ToFloat64(r.metrics.unidentified); n > 0 {
				fmt.Fprintln(&out, "dropped:", n)
			}
			if err != nil {
				fmt.Fprintln(&out, "error:", strings.ReplaceAll(err.Error(), server.URL, "http://engine"))
			}
			if err != nil {
				if points != nil {
					t.Error("elements and an error both")
				}
				_, again := r.Func(15*time.Second)(t.Context(), "another", noon)
				spare := newStandIn(t, "1")
				remote(t, RemoteConfig{URLs: []string{server.URL, spare.URL}}).Func(15*time.Second)(t.Context(), "q", noon)
				fmt.Fprintf(&out, "then: another engine is asked: %v; another query is asked: %v\n", spare.asked.Load() > 0, !strings.Contains(again.Error(), "not asked again"))
			}
			if *update {
				if err := os.WriteFile(file, []byte(sent+"\n---\n"+out.String()), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(want, out.String()); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

// An answer about 10,000 pods, as the shipped rule gives it.
func BenchmarkDecode(b *testing.B) {
	var body bytes.Buffer
	body.WriteString(`{"status":"success","data":{"resultType":"vector","result":[`)
	for i := range 10_000 {
		if i > 0 {
			body.WriteByte(',')
		}
		fmt.Fprintf(&body, `{"metric":{"namespace":"team-%d","pod":"web-%d","pod_uid":"0b6ad9a8-3a0f-4b7e-9d4f-%012d","shared":"false","instance":"10.0.%d.%d:9400","job":"capstan-exporter","node":"node-%d"},"value":[%d,"87.%d"]}`,
			i%50, i, i, i/250, i%250, i/8, noon.Unix(), i)
	}
	body.WriteString(`]}}`)
	b.SetBytes(int64(body.Len()))
	b.ReportAllocs()
	for b.Loop() {
		if a, f := decode(body.Bytes(), noon); f != nil || len(a.points) != 10_000 {
			b.Fatal(len(a.points), f)
		}
	}
}
