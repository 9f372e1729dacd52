package engine

import (
	"bytes"
	"fmt"
	"testing"
)

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
