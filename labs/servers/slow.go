// A server that is far away: every request that passes through waits.
//
//	slow 127.0.0.1:9001 127.0.0.1:9000 20ms
package main

import (
	"io"
	"net"
	"os"
	"time"
)

func main() {
	delay, _ := time.ParseDuration(os.Args[3])
	listener, err := net.Listen("tcp", os.Args[1])
	if err != nil {
		panic(err)
	}
	for {
		client, err := listener.Accept()
		if err != nil {
			panic(err)
		}
		go func() {
			defer client.Close()
			server, err := net.Dial("tcp", os.Args[2])
			if err != nil {
				return
			}
			defer server.Close()
			go func() {
				defer client.Close()
				// Of the two types only Read and Write: splice, which io.Copy would use, is slow here.
				answers := make([]byte, 1<<20)
				io.CopyBuffer(struct{ io.Writer }{client}, struct{ io.Reader }{server}, answers)
			}()
			request := make([]byte, 1<<16)
			for {
				n, err := client.Read(request)
				if err != nil {
					return
				}
				time.Sleep(delay)
				server.Write(request[:n])
			}
		}()
	}
}
